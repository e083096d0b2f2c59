import pytest

from workers.engines.vllm.paths.pool import LayerPool


def test_equal_contents_share_a_layer_and_known_ones_stay() -> None:
    pool = LayerPool(4)
    assert pool.place(["a", "b", "a"]) == ([0, 1, 0], {0, 1})
    assert pool.place(["c", "b"]) == ([2, 1], {2})
    assert pool.place(["a", "c", "b"]) == ([0, 2, 1], set())
    assert (len(pool), pool.has("c"), pool.has("d")) == (3, True, False)


def test_least_recently_used_is_replaced() -> None:
    """The least recently used layer is replaced, and never one of the path."""
    pool = LayerPool(3)
    pool.place(["a", "b", "c"])
    pool.place(["a"])
    assert pool.place(["d", "a"]) == ([1, 0], {1})
    assert pool.place(["e", "a", "d"]) == ([2, 0, 1], {2})
    assert [pool.has(content) for content in "abcde"] == [True, False, False, True, True]


def test_a_pool_is_never_overfull() -> None:
    pool = LayerPool(2)
    with pytest.raises(ValueError, match="3 different layers; the pool has 2"):
        pool.place(["a", "b", "c"])
    assert pool.place(["a", "b", "a", "b"]) == ([0, 1, 0, 1], {0, 1})
    pool.clear()
    assert (len(pool), pool.place(["b"])) == (0, ([0], {0}))
