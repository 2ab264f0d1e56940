"""GRPO in one file: sample from a server, reward short words, train the last layers with torch, update the server."""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from fd_core.models.catalog import resolve_model
from fd_core.models.opening import open_checkpoint

PROMPTS = ("The old man said that", "She looked at the sea and")
SAMPLES, TOKENS, CLIP = 8, 20, 0.2


def reward(text: str) -> float:
    """Return the share of words with at most three letters: easy to learn in ten steps, and easy to check."""
    words = text.split()
    return sum(len(word) <= 3 for word in words) / len(words) if words else 0.0


class Policy:
    """The Llama model of a checkpoint in float32; the last layers are trained."""

    def __init__(self, path: Path, trained: int) -> None:
        with open_checkpoint(path) as checkpoint:
            self.config = dict(checkpoint.config)
            names = [name for name in checkpoint.names() if name != "lm_head.weight"]
            self.weights = {name: torch.tensor(checkpoint.read(name).to_float32()) for name in names}
        self.first = self.config["num_hidden_layers"] - trained
        layers = [f"model.layers.{layer}." for layer in range(self.first, self.first + trained)]
        self.trained = [each.requires_grad_() for name, each in self.weights.items() if name.startswith(tuple(layers))]
        size = self.config["head_dim"] // 2
        turns = self.config["rope_theta"] ** -(torch.arange(size) / size)
        angles = torch.outer(torch.arange(512), torch.cat((turns, turns)))
        self.cos, self.sin = angles.cos(), angles.sin()

    def logprobs(self, ids: torch.Tensor, begin: int) -> torch.Tensor:
        """Return [N, T - begin], the log-probabilities of the tokens of `ids` [N, T] from position `begin` on."""
        with torch.no_grad():
            x = self.weights["model.embed_tokens.weight"][ids]
            for layer in range(self.first):
                x = self._layer(layer, x)
        for layer in range(self.first, self.config["num_hidden_layers"]):
            x = self._layer(layer, x)
        x = self._norm("model.norm.weight", x[:, begin - 1 : -1])
        logits = linear(x, self.weights["model.embed_tokens.weight"])
        return logits.log_softmax(-1).gather(-1, ids[:, begin:, None]).squeeze(-1)

    def save(self, folder: Path) -> None:
        """Write the weights as a server reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        weights = {name: each.detach().bfloat16() for name, each in self.weights.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    def _layer(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        own = f"model.layers.{layer}."
        y = self._norm(f"{own}input_layernorm.weight", x)
        q, k, v = (self._heads(y, self.weights[f"{own}self_attn.{name}_proj.weight"]) for name in "qkv")
        y = scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True, enable_gqa=True)
        x = x + linear(y.transpose(1, 2).flatten(2), self.weights[f"{own}self_attn.o_proj.weight"])
        y = self._norm(f"{own}post_attention_layernorm.weight", x)
        gate, up, down = (self.weights[f"{own}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return x + linear(silu(linear(y, gate)) * linear(y, up), down)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], self.weights[name], self.config["rms_norm_eps"])

    def _heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear(x, weight).unflatten(-1, (-1, self.config["head_dim"])).transpose(1, 2)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        length = x.shape[2]
        return x * self.cos[:length] + torch.cat((-right, left), -1) * self.sin[:length]


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """Return the server's answer."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)  # noqa: S310 - the user's address
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        return json.load(answer)


def train(url: str, folder: Path, steps: int, model: str = "smollm2", trained: int = 4) -> Iterator[float]:
    """Yield the mean reward of each step's samples; `folder` is the server's --weights-folder."""
    policy = Policy(resolve_model(model).path, trained)
    optimizer = torch.optim.Adam(policy.trained, lr=2e-4)
    for step in range(steps):
        rewards, losses = [], []
        for index, prompt in enumerate(PROMPTS):
            body = {"prompt": prompt, "n": SAMPLES, "max_tokens": TOKENS, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
            body |= {"ignore_eos": True, "logprobs": 0, "return_token_ids": True, "seed": 100 * step + index}
            choices = post(url, "/v1/completions", body)["choices"]
            if {each["weight_version"] for each in choices} != {str(step)}:
                raise RuntimeError(f"expected samples of version {step}; start the server anew, for this script alone")
            given = torch.tensor([reward(each["text"]) for each in choices])
            begin = len(choices[0]["prompt_token_ids"])
            ids = torch.tensor([each["prompt_token_ids"] + each["token_ids"] for each in choices])
            before = torch.tensor([each["logprobs"]["token_logprobs"] for each in choices])
            ratio = (policy.logprobs(ids, begin) - before).exp()
            advantage = ((given - given.mean()) / (given.std() + 1e-4))[:, None]
            losses.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean())
            rewards.append(given.mean())
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        policy.save(folder / f"weights-{step % 2}")
        post(url, "/v1/update_weights", {"model_path": f"weights-{step % 2}", "weight_version": str(step + 1)})
        yield float(torch.stack(rewards).mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the server's --weights-folder")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    for step, mean in enumerate(train(arguments.url, arguments.folder, arguments.steps)):
        print(f"step {step}: mean reward {mean:.3f}", flush=True)
