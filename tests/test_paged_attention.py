# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Pages hold what was written, and attention reads through them what it would read without them."""

import pytest
import torch
from atma.kernels import polar_attention as module
from atma.kernels.paged_polar_attention import paged_polar_attention
from atma.kernels.pages import gather_pages, write_pages
from atma.kernels.polar_attention import polar_attention_reference

BATCH, HEADS, GROUPS, DIM = 3, 4, 2, 8


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_ELEMENTS_CPU", 1)


def random(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def make_pool(sizes, page_size, dtype=torch.float64):
    return [torch.zeros(pages, page_size, GROUPS, DIM, dtype=dtype) for pages in sizes]


def make_table(batch, num_pages, seed=0):
    """Distinct pages in a random order; 0 is the scratch page."""
    order = torch.randperm(batch * num_pages, generator=torch.Generator().manual_seed(seed)) + 1
    return order.view(batch, num_pages)


def slab_sizes(slabs, total):
    """`total` pages cut into uneven slabs."""
    return [total] if slabs == 1 else [2, 1, total - 3]


def parameters(dtype=torch.float64):
    return [random(HEADS, DIM, dtype=dtype, seed=9)] + [
        random(HEADS, dtype=dtype, seed=10 + i) for i in range(4)
    ]


@pytest.mark.parametrize("slabs", [1, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_is_written_is_read(slabs, dtype):
    pool = make_pool(slab_sizes(slabs, 13), page_size=4)
    table = make_table(BATCH, 4).to(dtype)
    new = random(BATCH, 7, GROUPS, DIM)
    start, lengths = torch.tensor([0, 3, 9]), torch.tensor([7, 5, 0])
    write_pages(pool, table, new, start, lengths)
    expected = torch.zeros(BATCH, 16, GROUPS, DIM, dtype=torch.float64)
    for b in range(BATCH):
        expected[b, start[b] : start[b] + lengths[b]] = new[b, : lengths[b]]
    assert torch.equal(gather_pages(pool, table), expected)


@pytest.mark.parametrize("slabs", [1, 3])
def test_what_has_no_place_goes_to_the_scratch_page(slabs):
    pool = make_pool(slab_sizes(slabs, 7), page_size=4)
    table = torch.tensor([[1, 2], [3, 4]])
    new = random(2, 6, GROUPS, DIM) + 10
    write_pages(pool, table, new, torch.tensor([5, -3], dtype=torch.int32))
    row, other = gather_pages(pool, table)
    assert torch.equal(row[5:], new[0, :3]) and (row[:5] == 0).all()
    assert torch.equal(other[:3], new[1, 3:]) and (other[3:] == 0).all()
    assert (torch.cat(pool)[5:] == 0).all() and (pool[0][0] != 0).any()


def test_a_pool_of_another_dtype_takes_the_tokens():
    pool = make_pool([3], page_size=4, dtype=torch.bfloat16)
    new = random(1, 6, GROUPS, DIM, dtype=torch.float32)
    table = torch.tensor([[2, 1]])
    write_pages(pool, table, new, torch.tensor([0]))
    assert torch.equal(gather_pages(pool, table)[:, :6], new.bfloat16())


def test_a_pool_that_cannot_be_written_in_place_is_refused():
    pool = [torch.zeros(2, GROUPS, 4, DIM).transpose(1, 2)]
    with pytest.raises(RuntimeError, match="view"):
        write_pages(pool, torch.tensor([[1]]), torch.ones(1, 1, GROUPS, DIM), torch.tensor([0]))


def fill(slabs, page_size, num_pages, dtype=torch.float64, batch=BATCH):
    """Pools in which all positions of all rows are written, and their table."""
    table = make_table(batch, num_pages)
    start = torch.zeros(batch, dtype=torch.int64)
    pools = []
    for seed in (1, 2):
        pool = make_pool(slab_sizes(slabs, batch * num_pages + 1), page_size, dtype)
        content = random(batch, num_pages * page_size, GROUPS, DIM, seed=seed)
        write_pages(pool, table, content, start)
        pools.append(pool)
    return (*pools, table)


def assert_same(query, keys, values, table, start, tolerance=1e-10, **options):
    inputs = parameters(query.dtype)
    paged = paged_polar_attention(
        query, keys, values, table, start, *inputs, return_statistics=True, **options
    )
    whole = polar_attention_reference(
        query,
        gather_pages(keys, table).to(query.dtype),
        gather_pages(values, table).to(query.dtype),
        *inputs,
        query_start=start,
        return_statistics=True,
        **options,
    )
    for x, y in zip((*paged[:2], *paged.statistics), (*whole[:2], *whole.statistics), strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("slabs", [1, 3])
@pytest.mark.parametrize("page_size, num_pages", [(4, 40), (64, 3), (100, 2)])
@pytest.mark.parametrize("queries", [1, 2, 7, 65])
def test_pages_read_as_the_whole(small_blocks, queries, page_size, num_pages, slabs):
    keys, values, table = fill(slabs, page_size, num_pages)
    start = torch.tensor([0, 31, page_size * num_pages - queries])
    assert_same(random(BATCH, queries, HEADS, DIM), keys, values, table, start)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 17, 60, 1000])
@pytest.mark.parametrize("queries", [1, 2, 9])
def test_pages_read_as_the_whole_in_a_window(small_blocks, queries, window):
    keys, values, table = fill(1, 4, 16)
    for start in ([0, 1, 2], [3, 30, 64 - queries], [16, 19, -4]):
        start = torch.tensor(start, dtype=torch.int32)
        query = random(BATCH, queries, HEADS, DIM)
        assert_same(query, keys, values, table, start, window=window)


def test_pages_outside_the_window_are_not_read():
    keys, values, table = fill(1, 4, 16)
    for pool in (keys, values):
        pool[0][table[:, :10].flatten()] = torch.nan
    query, start = random(BATCH, 2, HEADS, DIM), torch.tensor([45, 50, 60])
    output = paged_polar_attention(query, keys, values, table, start, *parameters(), window=5)
    assert output.direction.isfinite().all() and output.magnitude.isfinite().all()


def test_no_more_than_a_block_of_pages_is_gathered(small_blocks, monkeypatch):
    from atma.kernels import paged_polar_attention as paged

    gathered = []

    def spy(slabs, pages):
        gathered.append(pages.shape[1])
        return gather_pages(slabs, pages)

    monkeypatch.setattr(paged, "gather_pages", spy)
    keys, values, table = fill(1, 4, 100)
    start = torch.tensor([399, 20, 0])
    assert_same(random(BATCH, 1, HEADS, DIM), keys, values, table, start)
    assert max(gathered) == 16 and sum(gathered) == 200


def test_steps_read_as_one_pass():
    """Tokens are written and read one, two and many at a time; a row ends before the others."""
    keys, values = make_pool([2, 11], 4), make_pool([2, 11], 4)
    table = make_table(2, 6)
    query = random(2, 20, HEADS, DIM)
    key, value = (random(2, 20, GROUPS, DIM, seed=seed) for seed in (1, 2))
    whole = polar_attention_reference(query, key, value, *parameters())
    lengths, done = torch.tensor([20, 15]), 0
    for count in (6, 1, 1, 2, 5, 5):
        new = slice(done, done + count)
        start = torch.minimum(torch.tensor([done, done]), lengths)
        real = (lengths - start).clamp(max=count)
        write_pages(keys, table, key[:, new], start, real)
        write_pages(values, table, value[:, new], start, real)
        step = paged_polar_attention(query[:, new], keys, values, table, start, *parameters())
        for b in range(2):
            t = slice(0, int(real[b]))
            torch.testing.assert_close(step.direction[b, t], whole.direction[b, new][t])
            torch.testing.assert_close(step.magnitude[b, t], whole.magnitude[b, new][t])
        done += count


def test_rows_may_share_pages():
    keys, values, table = fill(1, 4, 4)
    table[1, :3] = table[0, :3]
    assert_same(random(BATCH, 1, HEADS, DIM), keys, values, table, torch.tensor([13, 14, 15]))


def test_a_row_that_sees_nothing_reads_the_null():
    keys, values, table = fill(1, 4, 4)
    start = torch.tensor([-1, 3, -8])
    output = paged_polar_attention(
        random(BATCH, 1, HEADS, DIM), keys, values, table, start, *parameters()
    )
    null = torch.nn.functional.normalize(parameters()[0], dim=-1)
    torch.testing.assert_close(output.direction[0, 0], null)
    assert (output.magnitude[[0, 2]] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pools_in_low_precision_are_read_in_fp32(dtype):
    keys, values, table = fill(1, 4, 20, dtype=torch.bfloat16)
    query = random(BATCH, 3, HEADS, DIM, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(query, keys, values, table, torch.tensor([0, 40, 77]), tolerance)


def test_decode_compiles_as_one_graph():
    torch._dynamo.reset()
    learned = parameters()

    def decode(query, key, value, keys, values, table, start):
        write_pages(keys, table, key, start)
        write_pages(values, table, value, start)
        return paged_polar_attention(query, keys, values, table, start, *learned, window=9)

    new = [random(BATCH, 1, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    start = torch.tensor([3, 40, 63])
    results = []
    for function in (decode, torch.compile(decode, fullgraph=True, backend="aot_eager")):
        pools = fill(1, 4, 16)
        output = function(*new, *pools, start)
        results.append((output.direction, output.magnitude, pools[0][0], pools[1][0]))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


def test_what_does_not_fit_is_refused():
    keys, values, table = fill(1, 4, 2)
    query, start = random(BATCH, 1, HEADS, DIM), torch.tensor([0, 1, 2])
    for message, queries, options in (
        ("window must be at least 1", query, {"window": 0}),
        ("multiple of the 2 key/value heads", query[:, :, :3], {}),
        ("paged_polar_attention does not exist", query, {"backend": "triton"}),
    ):
        with pytest.raises(ValueError, match=message):
            paged_polar_attention(queries, keys, values, table, start, *parameters(), **options)
