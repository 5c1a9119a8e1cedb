"""What breaks a CUDA Graph and needs a GPU to show it, one thing each; the line at fault ends in its mark."""

import contextlib
import ctypes
import threading

import torch


def _x():
    return torch.linspace(-1.0, 1.0, 128, device="cuda").reshape(8, 16)


def stream_synchronize():
    def fn(x):
        y = x * 2
        torch.cuda.current_stream().synchronize()  # HERE stream_synchronize
        return y

    return fn, (_x(),)


def event_synchronize():
    event = torch.cuda.Event()

    def fn(x):
        y = x * 2
        event.record()
        event.synchronize()  # HERE event_synchronize
        return y

    return fn, (_x(),)


def swallowed():
    """The user's code hides what CUDA says, so that only the end of the capture fails."""

    def fn(x):
        y = x * 2
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()  # HERE swallowed
        return y

    return fn, (_x(),)


def allocation():
    """Past torch, and without an exception: the driver's answer is not looked at."""
    driver = ctypes.CDLL("libcuda.so.1")
    address = ctypes.c_uint64()

    def fn(x):
        y = x * 2
        driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 20))  # HERE allocation
        return y + 1

    return fn, (_x(),)


def pageable_copy():
    bias = torch.ones(16)

    def fn(x):
        there = bias.to(x.device)  # HERE pageable_copy
        return x + there

    return fn, (_x(),)


def legacy_stream():
    kept = torch.zeros(8, 16, device="cuda")

    def fn(x):
        with torch.cuda.stream(torch.cuda.default_stream()):
            torch.mul(x, 2, out=kept)  # HERE legacy_stream
        return x + 1

    return fn, (_x(),)


def uncaptured_stream():
    kept = torch.zeros(8, 16, device="cuda")
    side = torch.cuda.Stream()

    def fn(x):
        with torch.cuda.stream(side):
            torch.mul(x, 2, out=kept)  # HERE uncaptured_stream
        return x + 1

    return fn, (_x(),)


def unjoined_stream():
    side = torch.cuda.Stream()

    def fn(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x * 2  # HERE unjoined_stream
        return x + 1

    return fn, (_x(),)


def joined_stream():
    side = torch.cuda.Stream()

    def fn(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
        return y + 1

    return fn, (_x(),)


def cpu_input():
    def fn(x, scale):
        return x * scale  # HERE cpu_input

    return fn, {"x": _x(), "scale": torch.tensor(3.0)}


def other_thread():
    """Only the global mode minds what another thread does."""

    def grab():
        with contextlib.suppress(RuntimeError):
            torch.empty(1 << 26, device="cuda")  # HERE other_thread

    def fn(x):
        y = x * 2
        worker = threading.Thread(target=grab)
        worker.start()
        worker.join()
        return y + 1

    return fn, (_x(),)


def random_numbers():
    """Of the default generator: a replay draws what the function would."""

    def fn(x):
        return x + torch.rand_like(x)

    return fn, (_x(),)


class Cache(torch.nn.Module):
    """Writes in place, as a KV cache does: each call would go on where the last one ended."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(64, 16))
        self.register_buffer("at", torch.arange(8))

    def forward(self, x):
        self.kept.index_copy_(0, self.at, x)
        self.at += 8
        return self.kept.sum(0)


def cache():
    return Cache().cuda(), (_x(),)


def two_values():
    """Whole numbers are tried with the values of the other inputs, in the same tensors."""
    table = torch.arange(64.0, device="cuda").reshape(16, 4)

    def fn(ids):
        return table[ids]

    return fn, [(torch.tensor([1, 2, 3], device="cuda"),), (torch.tensor([4, 5, 6], device="cuda"),)]
