"""Key-value blocks: who has which, and what is given out next."""

from __future__ import annotations

import numpy as np

from erniekit.inference.decoding.blocks import BlockTables, blocks_of
from erniekit.inference.decoding.step import BLOCK_TOKENS


def test_a_request_has_as_many_blocks_as_its_tokens_need():
    assert [blocks_of(tokens) for tokens in (0, 1, BLOCK_TOKENS, BLOCK_TOKENS + 1)] == [0, 1, 1, 2]
    tables = BlockTables(8)
    for tokens in (1, BLOCK_TOKENS, 3 * BLOCK_TOKENS):
        assert tables.extend(7, tokens)
    assert tables.extend(9, 1)
    assert tables.extend(7, 1)  # it keeps what it has
    np.testing.assert_array_equal(tables.tables([9, 7]), [[3, -1, -1], [0, 1, 2]])
    assert tables.tables([7]).dtype == np.int32
    assert tables.free == 4


def test_blocks_that_are_given_back_come_first_the_lowest_before_the_others():
    tables = BlockTables(6)
    for request in (0, 1, 2):
        assert tables.extend(request, 2 * BLOCK_TOKENS)
    tables.release(1)
    tables.release(0)
    tables.release(5)  # has none
    assert tables.free == 4
    assert tables.extend(3, 3 * BLOCK_TOKENS)
    np.testing.assert_array_equal(tables.tables([3]), [[0, 1, 2]])


def test_too_few_blocks_change_nothing():
    tables = BlockTables(3)
    assert tables.extend(0, 2 * BLOCK_TOKENS)
    assert not tables.extend(1, 2 * BLOCK_TOKENS)
    assert not tables.extend(0, 4 * BLOCK_TOKENS)
    assert tables.free == 1
    np.testing.assert_array_equal(tables.tables([0]), [[0, 1]])
    assert tables.extend(0, 3 * BLOCK_TOKENS) and tables.free == 0


def test_full_blocks_are_had_by_several_as_long_as_one_of_them_lives():
    tables, tokens = BlockTables(8), list(range(40))
    for request in (0, 1):
        assert tables.extend(request, 40)
    for number in (0, 1):
        content = tables.content(0, number, tokens, "")
        assert not tables.adopt(1, number, content)
        tables.offer(0, number, content)
        assert tables.content(1, number, tokens, "other") != content
        assert tables.adopt(1, number, tables.content(1, number, tokens, ""))
    np.testing.assert_array_equal(tables.tables([0, 1]), [[0, 1, 2], [0, 1, 5]])
    assert tables.free == 4
    tables.release(0)
    assert tables.free == 5
    assert tables.extend(2, 40) and tables.adopt(2, 0, tables.content(2, 0, tokens, ""))
    np.testing.assert_array_equal(tables.tables([2]), [[0, 3, 4]])
    tables.release(1)
    tables.release(2)
    assert tables.free == 8
    assert tables.extend(3, 40) and not tables.adopt(3, 0, tables.content(3, 0, tokens, ""))
