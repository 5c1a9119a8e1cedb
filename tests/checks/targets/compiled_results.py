"""Results and times for `opusmon check compile`."""

import torch


class _Rounded(torch.nn.Module):
    """Differs between eager and compiled on purpose: only one of them sees that it is compiled."""

    def forward(self, x):
        return x + 1 if torch.compiler.is_compiling() else x


def fused():
    def fn(x, w):
        return torch.nn.functional.gelu(x @ w) * 2 + 1

    return fn, (torch.ones(8, 8), torch.ones(8, 8))


def wrong():
    return _Rounded(), (torch.zeros(4, 4),)


def random():
    def fn(x):
        return x + torch.rand_like(x)

    return fn, (torch.zeros(64),)


def trained():
    return torch.nn.Linear(4, 4), (torch.ones(2, 4),)


def writes_to_its_input():
    def fn(cache, x):
        cache.add_(x)
        return cache * 2

    return fn, (torch.zeros(4), torch.ones(4))


def raises():
    def fn(x):
        return x + missing  # noqa: F821  line that raises

    return fn, (torch.ones(4),)
