"""Which KV heads share a basis: similarity of their keys, and clusters of unequal or equal size."""

from __future__ import annotations

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor

Groups = tuple[tuple[int, ...], ...]
"""KV heads by group, each head once."""


def cka(heads: Tensor, gram: Tensor) -> Tensor:
    """Linear CKA of heads' keys: float64 [heads, heads], 1 on the diagonal.

    heads: projection weights [heads, dim, in]; gram: sum of (x - mean)(x - mean)' over the text's inputs, [in, in].
    With X_i the centred keys of head i, ||X_j'X_i||^2 / (||X_i'X_i|| ||X_j'X_j||) and X_j'X_i = W_j gram W_i'.
    """
    w = heads.double()
    cross = torch.einsum("iab,jcb->ijac", w @ gram.double(), w)
    norms = cross.square().sum((-1, -2))  # ||X_i'X_j||^2
    own = norms.diagonal().sqrt()
    return norms / (own[:, None] * own[None]).clamp(min=torch.finfo(torch.float64).tiny)


def clusterings(similarity: Tensor) -> list[Groups]:
    """Average-linkage clusterings on distance 1 - similarity, one per number of clusters from 1 to the heads.

    Fewer where ties leave no cut at some number.
    """
    heads = similarity.shape[0]
    if heads == 1:
        return [((0,),)]
    distance = (1 - similarity).clamp(min=0).fill_diagonal_(0).numpy()
    tree = linkage(squareform((distance + distance.T) / 2, checks=False), method="average")
    found = {_groups(fcluster(tree, count, criterion="maxclust")): None for count in range(1, heads + 1)}
    return list(found)


def _groups(labels: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Groups:
    """Heads by label, groups in the order of their first head."""
    by_label: dict[int, list[int]] = {}
    for head, label in enumerate(labels.tolist()):
        by_label.setdefault(label, []).append(head)
    return tuple(tuple(group) for group in by_label.values())


def equal_groups(similarity: Tensor, size: int) -> Groups:
    """Groups of `size` similar heads, the last of what is left over.

    Each starts with the first free head and takes the free head of greatest mean similarity to the group, one by one.
    """
    free, groups = list(range(similarity.shape[0])), []
    while free:
        group = [free.pop(0)]
        while free and len(group) < size:
            best = max(free, key=lambda head: (float(similarity[head, group].mean()), -head))
            free.remove(best)
            group.append(best)
        groups.append(tuple(sorted(group)))
    return tuple(groups)
