"""XPU: the core's Paddle pack on the device `xpu`."""

from __future__ import annotations

from typing import ClassVar

from fd_core.backends.paddle import PaddleBackend


class XpuBackend(PaddleBackend):
    """bfloat16 on an XPU; without one, emulated on the CPU in float32 if selected by name."""

    name: ClassVar[str] = "xpu"
    device: ClassVar[str] = "xpu"
    title: ClassVar[str] = "XPU"
    paddle_hint: ClassVar[str] = "install Paddle's build for XPU, paddlepaddle-xpu"
    can_be_emulated: ClassVar[bool] = True
    auto_rank: ClassVar[int] = 50

    def free_device_memory(self) -> int:
        """Return the free memory of the current XPU; the runtime includes the use of other processes."""
        from fd_core.ops.paddle.framework import paddle

        xpu = paddle.device.xpu  # its functions expect an index such as xpu:0, or nothing
        return max(int(xpu.memory_total()) - int(xpu.memory_used()), 0)
