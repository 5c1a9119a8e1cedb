"""What numpy has to do with a CUDA Graph; the line at fault ends in its mark."""

import random

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def made(fn):
    """The target of a function of one tensor."""
    return lambda: (fn, (torch.linspace(0.125, 1.0, 64, device=DEVICE).reshape(8, 8),))


@made
def array_index(x):
    y = x.clone()
    y[np.array([0, 2])] = x[2:4]  # HERE array_index
    return y


@made
def numpy_random(x):
    return x * np.random.rand()  # HERE numpy_random


def numpy_generator():
    rng = np.random.default_rng(0)

    def fn(x):
        return x * rng.normal()  # HERE numpy_generator

    return fn, (torch.ones(8, device=DEVICE),)


class Noisy(torch.nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def forward(self, x):
        return x * self.generator.uniform(0, 1)  # HERE own_generator


def old_generator():
    return Noisy(np.random.RandomState(0)), (torch.ones(8, device=DEVICE),)


def own_generator():
    return Noisy(random.Random(0)), (torch.ones(8, device=DEVICE),)


@made
def rarer_draw(x):
    return x * np.random.gumbel()  # HERE rarer_draw


@made
def made_anew(x):
    """A generator with a seed that each call makes for itself gives the same in each."""
    rng = np.random.default_rng(0)
    return x * rng.normal()
