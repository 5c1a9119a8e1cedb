"""Which GPU is measured on."""

import warnings

import pytest
from needs import needs

needs("torch")

with warnings.catch_warnings():
    # Of torch about itself, while it is imported.
    warnings.filterwarnings("ignore", module=r"torch\.")
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from opusmon.checks.basis import driver, use_gpu
    from opusmon.checks.target import Case


@pytest.fixture
def used(monkeypatch):
    """The devices that were made the current one."""
    devices = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append(str(device)))
    return devices


def on_the_second_gpu():
    with FakeTensorMode():
        return torch.empty(2, device="cuda:1")


@pytest.mark.parametrize(
    "case",
    [
        lambda tensor: Case("", torch.sin, ([1, {"x": tensor}],), {}),
        lambda tensor: Case("", torch.sin, (), {"x": tensor}),
        lambda tensor: Case("", Holding(tensor), (torch.zeros(1),), {}),
    ],
)
def test_the_gpu_of_inputs_and_parameters_is_made_the_current_one(used, case):
    assert str(use_gpu([case(on_the_second_gpu())])) == "cuda:1"
    assert used == ["cuda:1"]


def test_with_all_on_the_cpu_no_gpu_is_touched(used):
    assert use_gpu([Case("", torch.nn.Linear(2, 2), (torch.zeros(2),), {})]) is None
    assert used == []


class Holding(torch.nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.register_buffer("held", tensor)


def test_a_driver_that_is_not_there_is_not_known(monkeypatch):
    monkeypatch.setattr("opusmon.checks.basis.PROC_VERSION", "/nowhere")
    assert driver() == "driver of unknown version"
