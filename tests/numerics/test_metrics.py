import numpy as np

from quantkit.numerics import bfloat16, metrics


def _case(rows=9, cols=256):
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((rows, cols)).astype(np.float32)
    codes = rng.integers(-8, 8, (rows, cols)).astype(np.int8)
    scale = bfloat16.from_float32(rng.standard_normal((rows, cols // 64)).astype(np.float32))
    return reference, codes, scale


def test_sums_have_the_stated_order():
    reference, codes, scale = _case(rows=2)
    err2, ref2 = metrics.error_rows(reference, codes, scale, 64)
    for row in range(2):
        row_err2 = row_ref2 = 0.0
        for group in range(4):
            group_err2 = group_ref2 = 0.0
            for col in range(64 * group, 64 * group + 64):
                v = float(reference[row, col])
                e = v - int(codes[row, col]) * float(bfloat16.to_float32(scale)[row, group])
                group_err2 += e * e
                group_ref2 += v * v
            row_err2 += group_err2
            row_ref2 += group_ref2
        assert (err2[row], ref2[row]) == (row_err2, row_ref2)


def test_row_blocks_do_not_change_sums():
    reference, codes, scale = _case()
    whole = metrics.error_rows(reference, codes, scale, 64)
    for rows in (1, 4, 7):
        for start in range(0, 9, rows):
            part = slice(start, start + rows)
            sums = metrics.error_rows(reference[part], codes[part], scale[part], 64)
            assert [s.tolist() for s in sums] == [s[part].tolist() for s in whole]


def test_no_rows_and_no_columns_are_no_error():
    none = np.zeros((0, 64), np.float32)
    err2, ref2 = metrics.error_rows(none, np.zeros((0, 64), np.int8), np.zeros((0, 1), np.uint16), 64)
    assert err2.shape == ref2.shape == (0,)
    err2, ref2 = metrics.error_rows(
        np.zeros((3, 0), np.float32), np.zeros((3, 0), np.int32), np.zeros((3, 0), np.uint16), 64
    )
    assert err2.tolist() == ref2.tolist() == [0, 0, 0]
