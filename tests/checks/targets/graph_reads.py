"""Operators that no tag of torch tells of, and copies to the GPU that nobody wrote; the line at fault ends in its mark.

It runs on the GPU where there is one, on the CPU otherwise.
"""

import threading

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _x():
    return torch.linspace(0.125, 1.0, 64, device=DEVICE).reshape(8, 8)


def made(fn):
    """The target of a function of one tensor."""
    return lambda: (fn, (_x(),))


@made
def histc(x):
    return torch.histc(x, 8)  # HERE histc


@made
def same_ends(x):
    return x.histc(bins=8, min=2, max=2)  # HERE same_ends


@made
def normal(x):
    return torch.normal(x, x)  # HERE normal


@made
def sorter(x):
    order = x.argsort()
    return torch.searchsorted(x, x, sorter=order)  # HERE sorter


@made
def segments(x):
    lengths = torch.full((4,), 2, device=x.device)
    return torch.segment_reduce(x, "sum", lengths=lengths, axis=0)  # HERE segments


@made
def eigh(x):
    return torch.linalg.eigh(x + x.T)  # HERE eigh


@made
def svd(x):
    return torch.linalg.svdvals(x)  # HERE svd


@made
def matrix_exp(x):
    return torch.linalg.matrix_exp(x)  # HERE matrix_exp


@made
def filled_with(x):
    return x.masked_fill(x > 0.5, x.mean())  # HERE filled_with


@made
def ends(x):
    return torch.linspace(x.min(), x.max(), 4, device=x.device)  # HERE ends


@made
def sparse(x):
    return x.to_sparse()  # HERE sparse


@made
def mask_of_tensor(x):
    y = x.clone()
    y[y > 0.5] = y.mean()  # HERE mask_of_tensor
    return y


@made
def two_masks(x):
    y = x.clone()
    y[y[0] > 0.5, y[0] > 0.5] = 0.0  # HERE two_masks
    return y


@made
def index_of_host(x):
    return x[torch.tensor([0, 2])]  # HERE index_of_host


@made
def list_index(x):
    return x[:, [0, 2]]  # HERE list_index


@made
def number_at_rows(x):
    rows = torch.arange(4, device=x.device)
    y = x.clone()
    y[rows] = 0.0  # HERE number_at_rows
    return y


@made
def one_element(x):
    y = x.clone()
    y[0, 0] = 5.0  # HERE one_element
    return y


@made
def moved(x):
    bias = torch.tensor([0.5] * 8) * 2
    return x + bias.to(x.device)  # HERE moved


@made
def zeros_moved(x):
    return x + torch.zeros(8).to(x.device, dtype=x.dtype)  # HERE zeros_moved


@made
def arange_held(x):
    rows = torch.arange(8)
    rows = rows[None] + 1
    return x + rows.to(device=x.device)  # HERE arange_held


@made
def rand_moved(x):
    noise = torch.rand(8, 8)
    return x + noise.to(x.device)  # HERE rand_moved


@made
def drawn_in_place(x):
    noise = torch.empty(8, 8).uniform_()
    return x + noise.to(x)  # HERE drawn_in_place


@made
def window_moved(x):
    return x * torch.hann_window(8).type_as(x)  # HERE window_moved


@made
def arange_index(x):
    return x[torch.arange(2)]  # HERE arange_index


@made
def ones_copied(x):
    y = x.clone()
    y[0].copy_(torch.ones(8))  # HERE ones_copied
    return y


@made
def drawn_and_read(x):
    """A draw on the host is named where it is made, and only if its value is read."""
    chance = torch.rand(1) * 2  # HERE drawn_and_read
    return x * 2 if chance > 0.5 else x * 3


@made
def own_draw_moved(x):
    own = torch.Generator().manual_seed(0)
    noise = torch.rand(8, 8, generator=own)  # HERE own_draw
    return x + noise.to(x.device)  # HERE own_draw_moved


@made
def read_in_place(x):
    chance = torch.empty(1)
    chance.uniform_()  # HERE read_in_place
    return x * chance.item()


@made
def default_device(x):
    with torch.device(DEVICE):
        return x + torch.ones(8).to(x.device) + torch.rand(8).to(x.device)


@made
def clean_factories(x):
    """On the GPU from the start, or on the host and left there."""
    there = torch.arange(8, device=x.device).to(x.device) + torch.zeros(8, device=x.device).to(x.device)
    host = torch.arange(8).to(torch.float64) + torch.ones(8)
    count = int(torch.full((1,), 3).item()) + len(host)
    return x * count + there + torch.zeros_like(x).to(x.device) + x.new_zeros(8).to(x.device)


@made
def filled_from_host(x):
    y = x.clone()
    y[0].copy_(torch.tensor([0.5] * 8))  # HERE filled_from_host
    return y


@made
def copied_out(x):
    host = torch.empty(8, 8, device="cpu")
    host.copy_(x)  # HERE copied_out
    return x + 1


@made
def clean_reads(x):
    """Siblings of those above that a graph takes."""
    rows = torch.arange(4, device=x.device)
    y = x.clone()
    y[rows] = x[rows] + 1
    y[y > 0.5] = 0.0
    y[:, 0] = 5.0
    y[1:3] = 2.0
    y = y.masked_fill(y > 0.5, 1.0) + torch.segment_reduce(
        x, "sum", lengths=torch.full((8,), 1, device=x.device), axis=0, unsafe=True
    )
    found = torch.searchsorted(x, x)
    drawn = torch.normal(0.0, 1.0, (8, 8), device=x.device) * 0 + torch.normal(x, 1.0) * 0
    steps = torch.linspace(0.0, 1.0, 4, device=x.device)
    return y, torch.histc(x, 8, 0.0, 1.0), found, drawn, steps, x.to(torch.float64), torch.linalg.qr(x)


@made
def threaded(x):
    out = []
    thread = threading.Thread(target=lambda: out.append(x.sum().item()))  # HERE threaded
    thread.start()
    thread.join()
    return x * out[0]
