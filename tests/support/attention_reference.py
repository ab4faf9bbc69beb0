"""What paged attention means, token by token."""

import torch
from torch import Tensor

from foretoken.kernels.layout import RaggedBatch
from foretoken.kernels.torch_kv import TorchKV


def attention_reference(
    q: Tensor, kv: TorchKV, layer: int, batch: RaggedBatch, scale: float, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention` token by token in float64 over a cache already written: slow and plainly right."""
    num_tokens, num_heads, _ = q.shape
    kv_heads, v_dim = kv.v[layer].shape[1:]
    out = torch.zeros(num_tokens, num_heads, v_dim, dtype=torch.float64)
    for row in range(len(batch.seq_lens)):
        start, end = int(batch.query_start_loc[row]), int(batch.query_start_loc[row + 1])
        seq_len, num_causal = int(batch.seq_lens[row]), int(batch.num_causal[row])
        first = seq_len - (end - start)  # place of the row's first token
        lowest = 0 if batch.first_places is None else int(batch.first_places[row])
        tree = first + num_causal  # place of its first tree token
        for token in range(start, end):
            if batch.slot_mapping[token] < 0:
                continue
            own_place, bits = first + token - start, int(batch.tree_mask[token])
            seen: list[int] = []
            for place in range(lowest, seq_len):
                if own_place < tree:
                    visible = place <= own_place
                else:
                    visible = place < tree or bool(bits >> (place - tree) & 1)
                position = place if place < tree else int(batch.positions[start + place - first])
                if window is not None:
                    visible = visible and abs(int(batch.positions[token]) - position) < window
                if visible:
                    seen.append(int(batch.block_tables[row, place // batch.block_size]) * batch.block_size + place % batch.block_size)
            keys, values = (x.double().repeat_interleave(num_heads // kv_heads, 1) for x in kv.gather(layer, torch.tensor(seen)))
            scores = torch.einsum("hd,nhd->hn", q[token].double(), keys) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            total = scores.logsumexp(-1)
            if sinks is not None:
                total = torch.logaddexp(total, sinks.double())
            out[token] = torch.einsum("hn,nhd->hd", (scores - total[:, None]).exp(), values)
    return out.to(q.dtype)
