"""Networks of real shapes made on the spot, on the device that runs them, and an engine around them: nothing is read but a tokenizer.

Speed depends on shapes alone. Knows no measurement.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, PreTrainedConfig, Qwen3_5TextConfig

from ...kernels.decoder import decoder_program
from ...kernels.execution import Execution
from ...kernels.fuse import fuse
from ...kernels.graphs import GraphExecutor
from ...kernels.program import Program
from ...kernels.torch_executor import Kernels, TorchExecutor
from ...proposers.config import SpeculativeConfig
from ..boot import assemble, open_runner
from ..config import DEMO_MODEL, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from ..core import EngineCore
from ..drafters import Drafters, load_drafters
from ..model import LoadedModel
from ..model_folder import find_folder
from ..network_plan import NetworkPlan
from ..request import Request, SamplingParams

DEVIATION = 0.02  # of the random weights
TAPS = 3  # states of the target that an EAGLE-3 head reads side by side


@dataclass(frozen=True)
class Size:
    """A Llama to make."""

    title: str
    config: Mapping[str, Any]
    draft_vocab_size: int  # of the EAGLE-3 head


LLAMA_8B = Size(
    "Llama-3.1-8B's shape",
    {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "tie_word_embeddings": False,
    },
    32000,
)
LLAMA_1B = Size(
    "Llama-3.2-1B's shape",
    {**LLAMA_8B.config, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
    32000,
)
TINY = Size(
    "a tiny Llama",
    {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False,
    },
    128,
)

QWEN3_5_9B = Qwen3_5TextConfig(max_position_embeddings=16384)
TINY_QWEN3_5 = Qwen3_5TextConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, max_position_embeddings=1024,
)


class RandomWeights(Mapping[str, Tensor]):
    """A program's weights, each made when it is asked for: the device never holds one twice for longer than it takes to pack it."""

    def __init__(self, program: Program, device: torch.device, dtype: torch.dtype) -> None:
        self._shapes, self._device, self._dtype = program.weights, device, dtype

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        return torch.randn(shape, dtype=self._dtype, device=self._device) * DEVIATION

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def kernels_for(device: torch.device, **options: Any) -> Kernels | None:
    """Triton's where they can run: on a GPU, or in Triton's interpreter if TRITON_INTERPRET=1 asks for that."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    from ...kernels.triton_steps import TritonKernels

    return TritonKernels(**options)


def network(size: Size, device: torch.device, dtype: torch.dtype = torch.bfloat16, **options: Any) -> GraphExecutor:
    """options: of TritonKernels."""
    return made_network(LlamaConfig(**size.config), device, dtype, **options)


def made_network(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype = torch.bfloat16, **options: Any) -> GraphExecutor:
    """`network` of any family that is a program."""
    program, kernels = fuse(decoder_program(config)), kernels_for(device, **options)
    return GraphExecutor(TorchExecutor(program, RandomWeights(program, device, dtype), dtype, device=device, kernels=kernels))


def loaded(size: Size, executor: GraphExecutor, folder: Path) -> LoadedModel:
    """The network as the engine wants it. folder: for its config.json."""
    hf_config = LlamaConfig(architectures=["LlamaForCausalLM"], **size.config)
    hf_config.save_pretrained(folder)
    source = find_folder(DEMO_MODEL, None, lambda line: None)
    device = "cpu" if executor.device.type == "cpu" else str(executor.device)
    execution = Execution(executor.network.dtype, prefer_native=False, device=device)
    return LoadedModel(
        executor=executor,
        tokenizer=AutoTokenizer.from_pretrained(source, local_files_only=True),
        name=size.title,
        path=folder,
        hf_config=hf_config,
        vocab_size=executor.vocab_size,
        tokenizer_size=executor.vocab_size,
        max_model_len=executor.max_model_len,
        eos_token_ids=frozenset(),
        plan=NetworkPlan("torch", execution, executor.program, "made for measuring"),
    )


@dataclass
class MadeEngine:
    """An engine over a made network, stepped by hand."""

    core: EngineCore
    drafters: Drafters
    vocab_size: int
    num_made: int = 0

    @classmethod
    def make(
        cls, model: LoadedModel, speculative: SpeculativeConfig, rows: int, tokens_per_row: int, step_tokens: int
    ) -> MadeEngine:
        """Room for so many rows of so many tokens. step_tokens: the token budget."""
        num_blocks = rows * (-(-tokens_per_row // 16) + 2)
        config = EngineConfig(
            model=ModelConfig(str(model.path), max_model_len=min(tokens_per_row + 64, model.max_model_len)),
            cache=CacheConfig(num_blocks=num_blocks, enable_prefix_caching=False),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=max(step_tokens, rows), max_num_seqs=rows, max_draft_tokens_per_step=max(rows * 8, 16)
            ),
            speculative=speculative,
            allow_synthetic_acceptance=True,
        )
        drafters = load_drafters(config, speculative, model, lambda line: None)
        runner = open_runner(config, model, drafters, lambda line: None)
        if isinstance(model.executor, GraphExecutor):
            model.executor.be_patient()  # as it is while it serves
        return cls(assemble(config, speculative, model, runner, drafters.proposers), drafters, model.vocab_size)

    def add(self, prompt_tokens: int, new_tokens: int, method: str = "auto", temperature: float = 0.0) -> Request:
        """Queue a request for so many tokens, whatever they are."""
        self.num_made += 1
        generator = torch.Generator().manual_seed(self.num_made)
        prompt = torch.randint(8, self.vocab_size, (prompt_tokens,), generator=generator).tolist()
        params = SamplingParams(
            temperature=temperature, ignore_eos=True, detokenize=False, max_tokens=new_tokens, speculation={"method": method}
        )
        request = Request(f"made-{self.num_made}", prompt, params, 0.0, new_tokens, seed=self.num_made)
        self.core.add_request(request)
        return request

    def step(self) -> int:
        """One step; how many tokens it gave."""
        return sum(len(delta.token_ids) for delta in self.core.step(0.0))

    def until_decoding(self) -> None:
        """Step until every request has its first token."""
        while self.core.scheduler.num_waiting or any(not r.num_output_tokens for r in self.core.scheduler.running):
            self.step()

    def finish(self) -> int:
        """Step until nothing is left; how many tokens that gave."""
        total = 0
        while self.core.has_work:
            total += self.step()
        return total

    def drop(self) -> None:
        """End whatever runs."""
        for request_id in list(self.core.scheduler.requests):
            self.core.abort(request_id)


def write_eagle3(size: Size, folder: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A head of the target's width with one layer, in the layout of the EAGLE-3 authors, with random weights."""
    config = size.config
    width, inner, vocab_size = config["hidden_size"], config["intermediate_size"], size.draft_vocab_size
    q_width, kv_width = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "fc.weight": (width, TAPS * width),
        "norm.weight": (width,),
        "lm_head.weight": (vocab_size, width),
        "midlayer.self_attn.q_proj.weight": (q_width, 2 * width),
        "midlayer.self_attn.k_proj.weight": (kv_width, 2 * width),
        "midlayer.self_attn.v_proj.weight": (kv_width, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, q_width),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
        **{f"midlayer.{norm}.weight": (width,) for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
    }
    tensors = {
        name: torch.ones(shape, dtype=dtype) if len(shape) == 1 else (torch.randn(shape, dtype=dtype, device=device) * DEVIATION).cpu()
        for name, shape in shapes.items()
    }
    # Every so manieth token of the target's vocabulary.
    tensors["d2t"] = torch.arange(vocab_size) * (config["vocab_size"] // vocab_size - 1)
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in config.items() if name != "tie_word_embeddings"}
    head = {
        **kept, "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": vocab_size,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(head))
    save_file(tensors, folder / "model.safetensors")
    return folder
