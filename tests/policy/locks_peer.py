"""The locks-kv side of `test_locks_parity.py`; runs in that package's own environment and knows nothing of kvassay.

    python locks_peer.py JOB.npz RESULT.npz

Its plain-torch builder and scorer are called as they are. The combination of a group's heads exists there as a GPU
kernel alone; its rule, as documented in the kernel's source, is three lines here. The top-b is the package's torch one.
"""

import sys

import numpy as np
import torch
from locks.selection.rki4_build import rki4_build_refresh
from locks.selection.rki4_score_torch import rki4_score_torch
from locks.selection.rki4_state import Rki4State
from locks.selection.select import _topb_select_torch

PAGE = 16


def layer_answer(k, q, first, scale, budgets):
    """What the package makes of keys [tokens, kv_heads, dim] and queries [queries, q_heads, dim] from `first` on."""
    tokens, kv_heads, dim = k.shape
    queries, q_heads, _ = q.shape
    pages = -(-tokens // PAGE)
    state = Rki4State(
        torch.device("cpu"), num_layers=1, num_blocks=pages, n_kv=kv_heads, G=q_heads // kv_heads, head_dim=dim,
        page=PAGE, max_reqs=queries, max_pages=pages,
    )  # fmt: skip
    padded = torch.zeros(pages * PAGE, kv_heads, dim)
    padded[:tokens] = k
    blocks = padded.view(pages, PAGE, kv_heads, dim)
    table = torch.arange(pages, dtype=torch.int32)[None].expand(queries, -1).contiguous()
    rki4_build_refresh(state, 0, blocks, table[:1], torch.tensor([tokens], dtype=torch.int32), 1, force=True)
    lengths = first + 1 + torch.arange(queries, dtype=torch.int32)
    state.n_pages[:] = (lengths + PAGE - 1) // PAGE
    state.n_sel_hi[:] = state.n_pages - 1
    rki4_score_torch(state, 0, q, table, lengths, queries, scale)
    state.score.zero_()
    for r in range(queries):
        mass = state.score_h[r, :, :, : int(state.n_sel_hi[r])]
        state.score[r, :, : mass.shape[-1]] = (mass - mass.amax(-1, keepdim=True)).exp().sum(1)
    found = {"mass": state.score_h.numpy().copy()}
    for budget in budgets:
        state.b_fix[:] = budget // PAGE - 2
        _topb_select_torch(state, queries)
        found[f"pages{budget}"] = state.page_table.numpy().copy()
    slabs = zip(("v4", "vs", "c8", "cs", "mu8", "mus"), state.layer_state(0)[:6], strict=True)
    return found | {
        name: slab.float().numpy() if slab.dtype is torch.bfloat16 else slab.numpy() for name, slab in slabs
    }


def main():
    job = np.load(sys.argv[1])
    result = {}
    for name in sorted({key.split("/")[0] for key in job if "/" in key}):
        k, q = (torch.from_numpy(job[f"{name}/{side}"]) for side in ("k", "q"))
        answer = layer_answer(k, q, int(job[f"{name}/first"]), float(job[f"{name}/scale"]), job["budgets"].tolist())
        result |= {f"{name}/{key}": value for key, value in answer.items()}
    np.savez(sys.argv[2], **result)


if __name__ == "__main__":
    main()
