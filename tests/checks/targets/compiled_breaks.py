"""Graph breaks for `opusmon check compile`, each planted on a line of its own."""

import ctypes
import time

import torch

_LIBC = ctypes.CDLL(None)


def clean():
    def fn(x):
        return torch.relu(x) + 1

    return fn, (torch.ones(4),)


def item():
    def fn(x):
        y = x * 2
        n = y.sum().item()  # break: item
        return y + n

    return fn, (torch.ones(4),)


def branch():
    def fn(x):
        y = x * 2
        if y.sum() > 0:  # break: branch
            y = y + 1
        return y

    return fn, (torch.ones(4),)


def printed():
    def fn(x):
        y = x * 2
        print("here")  # break: print
        return y + 1

    return fn, (torch.ones(4),)


def sized_by_data():
    def fn(x):
        return x.unique() + 1  # break: unique

    return fn, (torch.ones(4),)


def c_function():
    def fn(x):
        y = x * 2
        _LIBC.abs(3)  # break: ctypes
        return y + 1

    return fn, (torch.ones(4),)


def clock():
    def fn(x):
        y = x * 2
        time.sleep(0)  # break: sleep
        return y + 1

    return fn, (torch.ones(4),)


def in_loop():
    def fn(x):
        y = x * 2
        for _ in range(2):
            y = y + 1
            torch._dynamo.graph_break()  # break: loop
        return y

    return fn, (torch.ones(4),)


@torch.compiler.disable
def _outside(x):
    return x * 2


def disabled():
    def fn(x):
        y = x * 2
        return _outside(y) + 1  # break: disabled

    return fn, (torch.ones(4),)


def compiled_by_target():
    @torch.compile
    def fn(x):
        y = x * 2
        torch._dynamo.graph_break()  # break: in a compiled function
        return y + 1

    return fn, (torch.ones(4),)


def compiled_module():
    module = torch.nn.Linear(4, 4).requires_grad_(False)
    module.compile()
    return module, (torch.ones(4),)


class _Breaking(torch.nn.Module):
    def forward(self, x):
        y = x * 2
        torch._dynamo.graph_break()  # break: in a compiled module
        return y + 1


def module_by_target():
    return torch.compile(_Breaking(), mode="reduce-overhead"), (torch.ones(4),)


def method_by_target():
    module = _Breaking()
    module.compile()
    return module, (torch.ones(4),)
