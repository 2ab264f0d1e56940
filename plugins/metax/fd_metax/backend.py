"""MetaX: the core's Paddle pack on Paddle's custom device `metax_gpu`."""

from __future__ import annotations

from typing import ClassVar

from fd_core.backends.paddle import PaddleBackend


class MetaxBackend(PaddleBackend):
    """bfloat16 on a MetaX GPU; without one, emulated on the CPU in float32 if selected by name."""

    name: ClassVar[str] = "metax"
    device: ClassVar[str] = "metax_gpu"
    title: ClassVar[str] = "MetaX GPU"
    paddle_hint: ClassVar[str] = "install Paddle and MetaX's device plugin for it, paddle-metax-gpu"
    can_be_emulated: ClassVar[bool] = True
    auto_rank: ClassVar[int] = 50
