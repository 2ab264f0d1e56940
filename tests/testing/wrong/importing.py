"""A postprocessor whose module changes the process."""

import torch

from fd_core.runner.postprocess.torch_matrix import TorchPostprocess

torch.set_num_threads(1)


class SetsThreads(TorchPostprocess):
    """A matrix is small; but the pack, which uses the CPU as well, has one thread from then on."""
