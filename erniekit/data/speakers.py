"""The speakers of recordings: who sounds alike, how many recordings stand alone, and an order that is fair to all.

Which recording of a speaker is most similar to another is what its record says; else the one with the most similar
shares of the codes of level 0, by the cosine. Those codes are made to hold what a sound is like as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from erniekit.data.code_reader import CodeReader
from erniekit.data.mixing import Purpose, generator
from erniekit.data.token_cache import TokenArrays

MOST_SIMILAR = "most_similar"  # the entry of the metadata, which ranks without data receive
_BLOCK = 1000  # recordings that are compared with all of their speaker at once
_DIGITS = 5  # of a cosine of float32 numbers; more differ between processors


def lone_recordings(speakers: Sequence[int]) -> int:
    """Return how many recordings have no other of the same speaker; a negative number is nobody's."""
    known = np.array([each for each in speakers if each >= 0], np.int64)
    return len(speakers) - len(known) + int(np.count_nonzero(np.bincount(known) == 1))


def groups(speakers: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the recordings of each speaker, ascending; a negative number is nobody's, and its recording alone.

    Args:
        speakers: int[n], the number of each recording's speaker.
    """
    order = np.argsort(speakers, kind="stable")
    ordered = np.asarray(speakers)[order]
    starts = np.flatnonzero(np.append(True, (ordered[1:] != ordered[:-1]) | (ordered[1:] < 0))[: len(ordered)])
    yield from np.split(order, starts[1:]) if len(order) else ()


def most_similar(arrays: TokenArrays, reader: CodeReader | None) -> np.ndarray:
    """Return for each recording of a source the most similar one of its speaker: int32[n]; -1: it has no other.

    What is found is put into the metadata of the arrays, from which ranks without data read it. It takes about
    0.15 ms for a recording, whose codes of level 0 are read.

    Args:
        reader: may be None where the metadata have it.

    Raises:
        DataError: a shard was changed.
    """
    if MOST_SIMILAR not in arrays.metadata:
        assert reader is not None, "a rank without data receives what the others have found"
        arrays.metadata[MOST_SIMILAR] = _find(reader).tolist()
    return np.array(arrays.metadata[MOST_SIMILAR], np.int32)


def _find(reader: CodeReader) -> np.ndarray:
    found = np.full(len(reader), -1, np.int32)
    told = dict(reader.facts.similar)
    for members in groups(reader.speaker()):
        if len(members) < 2:
            continue
        if not all(int(member) in told for member in members):
            found[members] = members[_nearest([reader.first_level(int(member)) for member in members])]
    for sample, other in told.items():
        found[sample] = other
    return found


def _nearest(codes: Sequence[np.ndarray]) -> np.ndarray:
    """Return for each recording which other has the largest cosine of the counts of its codes: int64[n]."""
    _, inverse = np.unique(np.concatenate(codes), return_inverse=True)
    rows = np.repeat(np.arange(len(codes)), [len(each) for each in codes])
    counts = np.zeros((len(codes), int(inverse.max()) + 1), np.float32)
    np.add.at(counts, (rows, inverse.ravel()), 1)
    counts /= np.linalg.norm(counts, axis=1, keepdims=True)
    nearest = np.empty(len(codes), np.int64)
    for start in range(0, len(codes), _BLOCK):
        own = np.arange(start, min(start + _BLOCK, len(codes)))
        cosines = np.round((counts[own] @ counts.T).astype(np.float64), _DIGITS)
        cosines[own - start, own] = -1
        nearest[own] = cosines.argmax(1)
    return nearest


def speaker_order(speakers: np.ndarray, *, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Return the samples of an epoch in which every speaker is heard equally often: int64[m * speakers].

    With m = ceil(samples / speakers), a speaker has the endless row of permutations of its samples, and epoch e takes
    the places e m .. e m + m - 1 of it: nobody is heard more often than others, and no sample is forgotten. The samples
    of the epoch are m rounds, in each of which every speaker is heard once.

    Args:
        speakers: int[n], the number of each sample's speaker; a negative one is nobody's: the sample is alone.
        shuffle: draw the permutations and the order in each round; without it, both are those of the data.
    """
    members = list(groups(speakers))
    if not members:
        return np.empty(0, np.int64)
    members.sort(key=lambda own: int(own[0]))
    rounds = -(-len(speakers) // len(members))
    places = epoch * rounds + np.arange(rounds)
    taken = np.empty((len(members), rounds), np.int64)
    for number, own in enumerate(members):
        passes, within = np.divmod(places, len(own))
        if shuffle and len(own) > 1:
            orders = [
                generator(Purpose.SPEAKER_ORDER, seed, int(which), number).permutation(own)
                for which in range(int(passes[0]), int(passes[-1]) + 1)
            ]
            taken[number] = np.stack(orders)[passes - passes[0], within]
        else:
            taken[number] = own[within]
    in_rounds = taken.T.copy()
    if shuffle:
        rng = generator(Purpose.SPEAKER_ROUNDS, seed, epoch)
        rng.permuted(in_rounds, axis=1, out=in_rounds)
    return in_rounds.ravel()
