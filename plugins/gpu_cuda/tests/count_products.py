"""Multiply by weights and by experts for many numbers of tokens, and print what compiles after the first of each."""

from __future__ import annotations

import torch
from compile_experts import stacked
from compile_products import FORMS, part
from fake_driver import FakeDriver
from fd_core.ops.contract import Experts

from fd_gpu_cuda.kernels.experts import expert_mixture
from fd_gpu_cuda.kernels.products import ProductDevice, weight_product

TOKENS = (3, 1, 2, 16, 17, 48, 64, 100, 128, 129, 300, 1000, 5000)


def main() -> None:
    driver, device = FakeDriver().install(), ProductDevice(132, 227 * 1024)
    product = weight_product(device)
    mixture = expert_mixture(device, product)
    for name in ("int4 of 32, minima", "fp8 of 128, by fp8"):
        weight = part(1024, 2048, FORMS[name])
        block = (stacked(name, 256, 256, torch.bfloat16), stacked(name, 256, 128, torch.bfloat16))
        experts = Experts(torch.empty(128, 256), *block, 8, True)
        for number, tokens in enumerate(TOKENS):
            x = torch.empty(tokens, 2048, dtype=torch.bfloat16)
            product(x, weight, x.new_empty(tokens, 1024))
            mixture(x[:, :256].contiguous(), experts, "silu", None)
            if not number:
                before = len(driver.compiled)
        print("".join(f"{name}: {each}\n" for each in driver.compiled[before:]), end="")


if __name__ == "__main__":
    main()
