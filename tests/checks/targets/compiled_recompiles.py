"""Recompiles for `opusmon check compile`."""

import torch


class _Model(torch.nn.Module):
    def forward(self, x):
        return x * 2


_MODEL = _Model()


def _scaled(x, n):
    return x * n  # guard: n


def _named(x, name):
    if name == "double":  # guard: name
        return x * 2
    return x + len(name)


class _Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = "a"

    def forward(self, x):
        self.words = self.words + "b"  # guard: words
        return x + len(self.words)


def by_batch(batch):
    return _MODEL, (torch.ones(batch, 4),)


def module_of_torch(batch):
    return torch.nn.Linear(4, 4), (torch.ones(batch, 4),)


def marked(batch):
    x = torch.ones(batch, 4)
    torch._dynamo.mark_dynamic(x, 0)
    return _MODEL, (x,)


def by_stride():
    return _MODEL, [(torch.ones(4, 4),), (torch.ones(4, 8)[:, ::2],)]


def by_number():
    return _scaled, [(torch.ones(4), 2.5), (torch.ones(4), 3.5), (torch.ones(4), 4.5)]


def by_name():
    return _named, [(torch.ones(4), "secret" * n) for n in range(1, 11)]


def by_state():
    return _Counting(), (torch.ones(4),)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def counting():
    return Counting(), torch.ones(4)
