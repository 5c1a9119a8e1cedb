"""Code that a CUDA Graph takes, and code that it does not, one thing each; the line at fault ends in its mark.

It runs on the GPU where there is one, on the CPU otherwise.
"""

import math
import random

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _x(rows=8):
    return torch.linspace(-1.0, 1.0, rows * 16, device=DEVICE).reshape(rows, 16)


def mlp(batch=8):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).to(DEVICE)
    return model.eval().requires_grad_(False), (_x(batch),)


def item():
    def fn(x):
        scale = x.sum().item()  # HERE item
        return x * scale

    return fn, (_x(),)


def branch():
    def fn(x):
        y = x + 1
        if y.sum() > 0:  # HERE branch
            y = y * 2
        return y

    return fn, (_x(),)


def cond():
    def fn(x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # HERE cond

    return fn, (_x(),)


@torch.library.custom_op("opusmon_test::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()  # HERE opaque


def opaque():
    """What the operator does inside is not seen from outside."""

    def fn(x):
        return torch.ops.opusmon_test.scaled(x)  # HERE scaled

    return fn, (_x(),)


def host_copy():
    def fn(x):
        rows = x.cpu()  # HERE host_copy
        return x * len(rows)

    return fn, (_x(),)


def to_host():
    def fn(x):
        rows = x.to("cpu")  # HERE to_host
        return x * len(rows)

    return fn, (_x(),)


def to_pinned():
    def fn(x):
        rows = x.to("cpu", non_blocking=True)  # HERE to_pinned
        return x * len(rows)

    return fn, (_x(),)


def to_pinned_by_place():
    def fn(x):
        rows = x.to("cpu", torch.float32, True)  # HERE to_pinned_by_place
        return x * len(rows)

    return fn, (_x(),)


def over_lines():
    def fn(x):
        rows = (
            x.to(torch.float64)
            .to(  # HERE over_lines
                device="cpu"
            )
        )  # fmt: skip
        return x * len(rows)

    return fn, (_x(),)


def tolist():
    def fn(x):
        rows = x.tolist()  # HERE tolist
        return x * len(rows)

    return fn, (_x(),)


def host_tensor():
    def fn(x):
        bias = torch.tensor([0.5] * 16, device=x.device)  # HERE host_tensor
        return x + bias

    return fn, (_x(),)


def frozen():
    def fn(x):
        factor = torch.tensor(0.5)  # HERE frozen
        return x * factor

    return fn, (_x(),)


def nonzero():
    def fn(x):
        at = torch.nonzero(x)  # HERE nonzero
        return x + at.shape[0]

    return fn, (_x(),)


def mask():
    def fn(x):
        positive = x > 0
        kept = x[positive]  # HERE mask
        return kept * 2

    return fn, (_x(),)


def unique():
    def fn(x):
        return torch.unique(x)  # HERE unique

    return fn, (_x(),)


def filled():
    """A mask that fills one value in makes no size depend on values."""

    def fn(x):
        y = x.clone()
        y[y > 0] = 0.0
        return y

    return fn, (_x(),)


def same_device():
    """Where it goes is not said to be the host; without a GPU it only happens to be."""
    elsewhere = torch.ones(16, device=DEVICE)

    def fn(x):
        y = x.to(elsewhere.device) + elsewhere if DEVICE != "cpu" or len(x) else x
        return y.to(DEVICE)

    return fn, (_x(),)


def synchronize():
    def fn(x):
        y = x * 2
        torch.cuda.synchronize()  # HERE synchronize
        return y

    return fn, (_x(),)


def generator():
    own = torch.Generator(device=DEVICE)

    def fn(x):
        noise = torch.rand(x.shape, device=x.device, generator=own)  # HERE generator
        return x + noise

    return fn, (_x(),)


def host_random():
    def fn(x):
        factor = random.random()  # HERE host_random
        return x * factor

    return fn, (_x(),)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.step = 0

    def forward(self, x):
        self.step += 1  # HERE python_state
        return x * self.step


def python_state():
    return Counting(), (_x(),)


class Nested(torch.nn.Module):
    """What changes the state is the rest of a line, after a function that it calls."""

    def __init__(self):
        super().__init__()
        self.step = 0

    def following(self):
        return self.step + 1

    def forward(self, x):
        y = x * 2
        self.step = self.following()  # HERE nested_state
        y = y * self.step
        return y + 1


def nested_state():
    return Nested(), (_x(),)


class Logging(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1  # HERE harmless_state
        return x * 2


def harmless_state():
    return Logging(), (_x(),)


class NotANumber(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.limit = math.nan

    def forward(self, x):
        y = x * 2
        return y + 1


def not_a_number():
    return NotANumber(), (_x(),)


def two():
    def fn(x):
        scale = x.amax().item()  # HERE two_item
        y = x * scale
        at = torch.nonzero(y)  # HERE two_nonzero
        return y[: at.shape[0]]

    return fn, (_x(),)


def loop():
    def fn(x):
        for _ in range(3):
            x = x * x.sum().item()  # HERE loop
        return x

    return fn, (_x(),)


def graph_break():
    def fn(x):
        y = x * 2
        print("called")  # HERE graph_break
        return y + 1

    return fn, (_x(),)


def buckets(batch=1, scale=1):
    def fn(x, scale, mode):
        return x * scale

    return fn, {"x": _x(batch), "scale": scale, "mode": "secret words"}


def raises():
    def fn(x):
        return x @ x  # HERE raises

    return fn, (_x(),)


def enclosed_state():
    step = 0

    def fn(x):
        nonlocal step
        step += 1  # HERE enclosed_state
        return x * step

    return fn, torch.ones(4)


def enclosed_list():
    log = []

    def fn(x):
        log.append(1)  # HERE enclosed_list
        return x * len(log)

    return fn, torch.ones(4)


def tensor_state():
    total = torch.zeros(4)

    def fn(x):
        return total.add_(x).clone()

    return fn, torch.ones(4)


def optimizer():
    weight = torch.nn.Parameter(torch.ones(4))
    adam = torch.optim.AdamW([weight])

    def fn(x):
        adam.zero_grad()
        (weight * x).sum().backward()
        adam.step()  # HERE optimizer

    return fn, torch.ones(4)


def lazy():
    def fn(x):
        yield x + 1

    return fn, torch.ones(4)


def stream():
    def fn(x):
        with torch.cuda.stream(torch.cuda.Stream()):  # HERE stream
            return x + 1

    return fn, torch.ones(4)


def printed():
    def fn(x):
        print(x)  # HERE printed
        return x + 1

    return fn, torch.ones(4)


def one_hot():
    def fn(x):
        rows = x.long()
        known = torch.nn.functional.one_hot(rows, 4) + torch.nn.functional.one_hot(rows, num_classes=4)
        return known, torch.nn.functional.one_hot(rows)  # HERE one_hot

    return fn, torch.ones(4)
