"""Custom operators for `opusmon check compile`: one right, and one for each way to be wrong."""

import os
import signal

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("planted::right", mutates_args=())
def right(x: Tensor) -> Tensor:
    return x * 2


@right.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@custom_op("planted::no_fake", mutates_args=())
def no_fake(x: Tensor) -> Tensor:
    return x * 2


@custom_op("planted::wrong_schema", mutates_args=())
def wrong_schema(x: Tensor, out: Tensor) -> None:
    out.copy_(x)


@wrong_schema.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


@custom_op("planted::wrong_fake", mutates_args=())
def wrong_fake(x: Tensor) -> Tensor:
    return x.sum(0)


@wrong_fake.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@custom_op("planted::no_autograd", mutates_args=())
def no_autograd(x: Tensor) -> Tensor:
    return x * 2


@no_autograd.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@custom_op("planted::writes", mutates_args=("out",))
def writes(x: Tensor, out: Tensor) -> None:
    out.copy_(x)


@writes.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


def clean():
    def fn(x, out):
        writes(x, out)
        return right(x) + out

    return fn, (torch.ones(4, 4), torch.zeros(4, 4))


def without_fake():
    def fn(x):
        return no_fake(x) + 1  # line without a fake

    return fn, (torch.ones(4, 4),)


def undeclared():
    def fn(x, out):
        wrong_schema(x, out)  # line that writes undeclared
        return out + 1

    return fn, (torch.ones(4, 4), torch.zeros(4, 4))


def other_shape():
    def fn(x):
        return wrong_fake(x) + 1  # line with a wrong fake

    return fn, (torch.ones(4, 4),)


def trained():
    def fn(x):
        return no_autograd(x) + 1  # line without autograd

    return fn, (torch.ones(4, 4, requires_grad=True),)


def all_three():
    def fn(x, out):
        y = right(x)
        z = no_fake(y)  # all three: no fake
        wrong_schema(z, out)  # all three: undeclared
        return out + 1

    return fn, (torch.ones(4, 4), torch.zeros(4, 4))


@custom_op("planted::crashes", mutates_args=())
def crashes(x: Tensor) -> Tensor:
    return x * 2


@crashes.register_fake
def _(x: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGSEGV)
    return torch.empty_like(x)


def crashing():
    return crashes, (torch.ones(4),)
