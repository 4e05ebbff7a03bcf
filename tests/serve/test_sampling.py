"""Sampling against numpy: filters against a sort, draws against the softmax, penalties by hand, and bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pallasite.serve.sampling import NOT_FINITE, Sampled, _noise, filter_logits, penalize, sample
from pallasite.serve.slots import SlotParams
from pallasite.serve.types import MAX_BAD_IDS, MAX_LOGPROBS, MAX_STOP_IDS

PLAIN = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_k": 0,
    "seeds": 0,
    "ends": 1000,
    "min_positions": 0,
    "prompt_lengths": 1,
    "has_penalty": False,
    "wants_logprobs": False,
}
DTYPES = {"top_k": np.int32, "seeds": np.uint32, "ends": np.int32, "min_positions": np.int32}
DTYPES |= {"prompt_lengths": np.int32, "has_penalty": np.bool_, "wants_logprobs": np.bool_}


def params(rows: int, *, bad_ids=(), stop_ids=(), **fields) -> SlotParams:
    """Parameters of `rows` rows; a field is one value for all or a list; ids are lists for all rows."""
    columns = {
        name: np.broadcast_to(np.asarray(fields.pop(name, default), DTYPES.get(name, np.float32)), rows)
        for name, default in PLAIN.items()
    }
    assert not fields
    for name, ids, width in (("bad_ids", bad_ids, MAX_BAD_IDS), ("stop_ids", stop_ids, MAX_STOP_IDS)):
        columns[name] = np.full((rows, width), -1, np.int32)
        columns[name][:, : len(ids)] = ids
    return SlotParams(**columns)


@functools.partial(jax.jit, static_argnames="draws")
def _sample(logits, fields, positions, prompt_seen, output_counts, draws: int) -> Sampled:
    fields = SlotParams(**fields)
    slots = jnp.arange(logits.shape[0], dtype=jnp.int32)
    if draws == 1:
        return sample(logits, fields, positions, prompt_seen, output_counts, slots)

    def once(position):
        return sample(logits, fields, positions + position, prompt_seen, output_counts, slots)

    return jax.lax.map(once, jnp.arange(draws, dtype=jnp.int32))


def run(logits, positions=0, prompt_seen=None, output_counts=None, draws: int = 1, padded=True, **fields) -> Sampled:
    """sample() of rows of logits; draws > 1 repeats it at as many following positions, a leading axis more.

    padded: to 20 rows and 64 ids, so that one compiled program serves most tests.
    """
    logits = np.asarray(logits, np.float32)
    rows, vocab = logits.shape
    more = ((0, max(0, 20 - rows)), (0, max(0, 64 - vocab))) if padded else ((0, 0), (0, 0))
    seen = np.zeros(logits.shape, bool) if prompt_seen is None else np.asarray(prompt_seen, bool)
    counts = np.zeros(logits.shape, np.int16) if output_counts is None else np.asarray(output_counts, np.int16)
    logits = np.pad(logits, more, constant_values=-np.inf)
    arrays = [np.pad(np.broadcast_to(np.asarray(positions, np.int32), rows), more[0], mode="edge")]
    arrays += [np.pad(a, more) for a in (seen, counts)]
    columns = {
        name: np.pad(c, [more[0]] + [(0, 0)] * (c.ndim - 1), "edge") for name, c in vars(params(rows, **fields)).items()
    }
    result = _sample(logits, columns, *arrays, draws)
    axis = 0 if draws == 1 else 1
    return jax.tree.map(lambda a: np.take(np.asarray(a), np.arange(rows), axis), result)


def floats(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, vocab)) * scale).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(-1, keepdims=True), dtype=float)
    return weights / weights.sum(-1, keepdims=True)


def kept(logits, top_k=0, top_p=1.0) -> np.ndarray:
    logits = np.asarray(logits, np.float32)
    rows = logits.shape[0]
    k, p = np.broadcast_to(np.int32(top_k), rows), np.broadcast_to(np.float32(top_p), rows)
    got = np.asarray(jax.jit(filter_logits)(logits, k, p))
    mask = got > -np.inf
    np.testing.assert_array_equal(got[mask], logits[mask])
    return mask


class TestFilters:
    @pytest.mark.parametrize("k", [1, 2, 17, 63, 64])
    def test_top_k_is_exact(self, k):
        x = floats(16, 64)
        np.testing.assert_array_equal(kept(x, k), x >= np.sort(x)[:, [-k]])
        assert (kept(x, k).sum(-1) == k).all()

    def test_top_k_keeps_all_ties_at_the_threshold(self):
        x = [[1, 3, 2, 2, 2, 0], [5, 5, 5, 5, 5, 5], [0.0, 1.0, 1.0, -1.0, -1.0, -2.0]]
        assert kept(x, [2, 1, 4]).astype(int).tolist() == [[0, 1, 1, 1, 1, 0], [1] * 6, [1, 1, 1, 1, 1, 0]]

    def test_top_k_tells_neighbouring_floats_apart(self):
        x = np.asarray(
            [1.0, np.nextafter(np.float32(1), np.float32(2)), -1.0, np.nextafter(np.float32(-1), np.float32(0))]
        )
        assert kept([x, -x], [1, 1]).argmax(-1).tolist() == [1, 2]
        assert kept([x, -x], [3, 3]).argmin(-1).tolist() == [2, 1]

    @pytest.mark.parametrize("k", [0, -1, 65, 2**31 - 1])
    def test_top_k_off_or_beyond_the_vocabulary_keeps_all(self, k):
        assert kept(floats(3, 64), k).all()

    def test_top_k_does_not_fill_up_with_minus_infinity(self):
        x = np.asarray([[1, -np.inf, 2, -np.inf]])
        assert kept(x, 3).tolist() == [[True, False, True, False]]

    @pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.9, 0.99])
    @pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
    def test_top_p_is_the_smallest_set_that_reaches_p(self, p, scale):
        x = floats(32, 64, scale=scale)
        x[:, ::5] = -np.inf
        for row, mask in zip(x, kept(x, top_p=p), strict=True):
            probability = softmax(row)
            order = np.argsort(-row, kind="stable")
            total = np.cumsum(probability[order])
            count = int(np.argmax(total >= p - 1e-6)) + 1  # a sum that reaches p to the last bit may go either way
            assert mask.sum() in (count, count + (abs(total[count - 1] - p) < 2e-6))
            assert set(np.flatnonzero(mask)) == set(order[: mask.sum()])
            assert not mask[::5].any()

    def test_top_p_keeps_ties(self):
        assert kept([[2.0, 1.0, 1.0, 1.0, -9.0]], top_p=0.6).tolist() == [[True, True, True, True, False]]

    def test_top_p_of_what_top_k_left(self):
        x = np.log([[0.4, 0.3, 0.2, 0.1]])
        # Of the two that are left the first has 4/7.
        assert kept(x, 2, 0.56).tolist() == [[True, False, False, False]]
        assert kept(x, 2, 0.58).tolist() == [[True, True, False, False]]

    @pytest.mark.parametrize("p", [1e-6, 1e-30, 1e-45, 1e-300])
    def test_the_smallest_top_p_keeps_the_most_likely(self, p):
        """Down to numbers that are 0 in float32."""
        x = floats(8, 64)
        np.testing.assert_array_equal(kept(x, top_p=p), x == x.max(-1, keepdims=True))

    def test_every_row_has_its_own_parameters(self):
        x = np.repeat(np.log([[0.4, 0.3, 0.2, 0.1]]), 4, axis=0)
        got = kept(x, [0, 1, 3, 0], np.float32([1.0, 1.0, 0.5, 0.85]))
        assert got.sum(-1).tolist() == [4, 1, 2, 3]


class TestNoise:
    def test_does_not_depend_on_the_vocabularys_padding_or_the_row(self):
        seeds, positions = np.asarray([1, 2, 3, 2], np.uint32), np.asarray([5, 6, 7, 6], np.int32)
        noise = np.asarray(_noise(seeds, positions, 200))
        np.testing.assert_array_equal(_noise(seeds, positions, 256)[:, :200], noise)
        np.testing.assert_array_equal(noise[1], noise[3])
        np.testing.assert_array_equal(_noise(seeds[2:3], positions[2:3], 200)[0], noise[2])

    def test_differs_between_seeds_positions_and_tokens(self):
        """And the two are not interchangeable: (1, 2) is not (2, 1)."""
        pairs = np.asarray([(s, p) for s in (0, 1, 2, 2**31, 2**32 - 1) for p in (0, 1, 2, 4095)])
        noise = np.asarray(_noise(pairs[:, 0].astype(np.uint32), pairs[:, 1].astype(np.int32), 256))
        correlation = np.corrcoef(noise) - np.eye(len(pairs))
        assert np.abs(correlation).max() < 0.35  # 256 independent numbers: 5.5 standard deviations
        assert np.abs(np.corrcoef(noise.T)).mean() < 0.25

    def test_is_gumbel_distributed(self):
        rows = np.arange(64)
        noise = np.asarray(_noise(rows.astype(np.uint32), rows.astype(np.int32) * 7, 1024)).ravel()
        assert stats.kstest(noise, "gumbel_r").pvalue > 1e-3

    def test_the_extreme_hashes_give_finite_noise(self):
        """Words that hash to the ends of the range; where the noise is large, neighbouring hashes stay apart."""
        seeds, positions, tokens = _words_that_hash_to(np.asarray([0, 2**32 - 1, 2**31, 1, 2, 2**32 - 512]))
        noise = np.concatenate([_noise_at(s, p, t) for s, p, t in zip(seeds, positions, tokens, strict=True)])
        assert np.isfinite(noise).all()
        assert noise.min() == noise[1] == pytest.approx(-np.log(24 * np.log(2)), rel=1e-5)  # u = 2 ** -24
        assert noise.max() == noise[0] == pytest.approx(33 * np.log(2), rel=1e-5)  # u = 1 - 2 ** -33
        assert noise[0] > noise[3] > noise[4]


MASK = 2**32 - 1


def _words_that_hash_to(targets: np.ndarray) -> tuple[list[int], list[int], list[int]]:
    """(seed, position, token id 0) whose 32-bit MurmurHash3 is each target: every step of the hash can be undone."""

    def unshift(h: int, bits: int) -> int:
        out = h
        for _ in range(32 // bits):
            out = h ^ (out >> bits)
        return out

    def right(x: int, bits: int) -> int:
        return ((x >> bits) | (x << (32 - bits))) & MASK

    def inverse(x: int) -> int:
        return pow(x, -1, 2**32)

    seeds = []
    for h in map(int, targets):
        h = unshift(h, 16)
        h = unshift(h * inverse(0xC2B2AE35) & MASK, 13)
        h = unshift(h * inverse(0x85EBCA6B) & MASK, 16) ^ 12
        for _ in range(2):  # token id 0 and position 0, whose mixed words are 0
            h = right((h - 0xE6546B64) * inverse(5) & MASK, 13)
        k = right((h - 0xE6546B64) * inverse(5) & MASK, 13)
        seeds.append(right(k * inverse(0x1B873593) & MASK, 15) * inverse(0xCC9E2D51) & MASK)
    return seeds, [0] * len(seeds), [0] * len(seeds)


def _noise_at(seed: int, position: int, token: int) -> np.ndarray:
    return np.asarray(_noise(np.asarray([seed], np.uint32), np.asarray([position], np.int32), token + 1))[:, token]


class TestDraws:
    """Case C05: draws follow the softmax; chi-square at a significance of 1 in 10,000, over seeds and positions."""

    ROWS, DRAWS = 200, 50

    def draw(self, logits: np.ndarray, **fields) -> np.ndarray:
        """ROWS x DRAWS tokens of one row of logits, as many seeds times as many positions."""
        rows = np.repeat(np.asarray(logits, np.float32)[None], self.ROWS, axis=0)
        return run(rows, seeds=np.arange(self.ROWS) * 7919, draws=self.DRAWS, **fields).tokens.ravel()

    def check(self, tokens: np.ndarray, probability: np.ndarray) -> None:
        seen = np.bincount(tokens, minlength=len(probability))
        assert not seen[probability == 0].any()
        likely = probability * tokens.size >= 5
        assert likely.sum() > 1
        expected = probability[likely] * tokens.size
        observed = seen[likely]
        if (rest := probability[~likely].sum()) > 0:
            expected, observed = np.append(expected, rest * tokens.size), np.append(observed, seen[~likely].sum())
        assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-4

    @pytest.mark.parametrize("top_k", [0, 2**31 - 1, 1_000_000_000])
    def test_flat_logits(self, top_k):
        self.check(self.draw(np.zeros(64), temperature=1.5, top_k=top_k), np.full(64, 1 / 64))

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
    def test_softmax_with_temperature(self, temperature):
        x = floats(1, 64)[0]
        self.check(self.draw(x, temperature=temperature), softmax(x / temperature))

    def test_filters_renormalize(self):
        x = floats(1, 64, scale=1)[0]
        threshold = np.sort(x)[-10]
        self.check(self.draw(x, top_k=10), np.where(x >= threshold, softmax(np.where(x >= threshold, x, -np.inf)), 0))
        p = softmax(x)
        mask = kept(x[None], top_p=0.7)[0]
        self.check(self.draw(x, top_p=0.7), np.where(mask, p, 0) / p[mask].sum())
        mask = p >= 0.3 * p.max()
        self.check(self.draw(x, min_p=0.3), np.where(mask, p, 0) / p[mask].sum())

    def test_top_k_one_and_min_p_one_take_the_most_likely(self):
        x = floats(1, 64)[0]
        for fields in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}, {"temperature": 1e-4}):
            assert (self.draw(x, **fields) == x.argmax()).all()

    def test_one_seed_draws_independently_at_its_positions(self):
        """Neighbouring tokens of one answer: pairs are as frequent as the product says."""
        rows = np.zeros((self.ROWS, 4), np.float32)
        tokens = run(rows, seeds=np.arange(self.ROWS), draws=self.DRAWS).tokens
        pairs = np.histogram2d(tokens[:-1].ravel(), tokens[1:].ravel(), bins=4)[0]
        assert stats.chisquare(pairs.ravel()).pvalue > 1e-4

    def test_a19_padded_ids_are_never_drawn(self):
        """Temperature 2, flat, 10,000 draws, and a hundred ids that are no tokens."""
        x = np.zeros(256)
        x[151:] = -np.inf
        tokens = self.draw(x, temperature=2.0)
        assert tokens.size == 10_000
        assert tokens.max() < 151
        self.check(tokens, np.where(np.arange(256) < 151, 1 / 151, 0))

    def test_draws_do_not_depend_on_the_batch(self):
        """Case C14: rows with their own parameters, in any order and alone."""
        x = floats(12, 64)
        fields = {
            "temperature": np.linspace(0, 2, 12),
            "top_k": np.arange(12) * 3,
            "top_p": np.linspace(0.3, 1, 12),
            "min_p": np.linspace(0, 0.2, 12),
            "seeds": np.arange(12) % 5,
        }
        together = run(x, positions=np.arange(12), draws=8, **fields).tokens
        order = np.random.default_rng(0).permutation(12)
        shuffled = run(x[order], positions=order, draws=8, **{k: v[order] for k, v in fields.items()}).tokens
        np.testing.assert_array_equal(shuffled, together[:, order])
        for i in (0, 3, 11):
            one = slice(i, i + 1)
            alone = run(x[one], [i], draws=8, padded=False, **{k: v[one] for k, v in fields.items()}).tokens
            np.testing.assert_array_equal(alone[:, 0], together[:, i])

    def test_draws_do_not_depend_on_the_vocabularys_padding(self):
        x = floats(8, 150, scale=0.5)
        padded = np.pad(x, ((0, 0), (0, 106)), constant_values=-np.inf)
        seeds = np.arange(8)
        np.testing.assert_array_equal(
            run(x, seeds=seeds, draws=8, padded=False).tokens, run(padded, seeds=seeds, draws=8, padded=False).tokens
        )


class TestGreedy:
    def test_c03_temperature_zero_is_the_argmax_whatever_else_is_set(self):
        x = floats(20, 64)
        fields = {"temperature": 0.0, "top_p": 0.5, "top_k": 50, "min_p": 0.1, "seeds": np.arange(20)}
        np.testing.assert_array_equal(run(x, draws=8, **fields).tokens, np.broadcast_to(x.argmax(-1), (8, 20)))

    def test_greedy_rows_beside_sampled_ones(self):
        x = floats(20, 64, scale=0.1)
        tokens = run(x, draws=8, temperature=np.arange(20) % 2 * 1.5, seeds=np.arange(20)).tokens
        assert (tokens[:, ::2] == x[::2].argmax(-1)).all()
        assert (tokens[:, 1::2] != x[1::2].argmax(-1)).any()

    @pytest.mark.parametrize("temperature", [1e-4, 1e-20, 1e-37, 1e-42, 1e-300])
    @pytest.mark.parametrize("scale", [1, 1000])
    def test_the_smallest_temperatures_do_not_overflow(self, temperature, scale):
        """x / temperature passes float32's largest number."""
        x = np.asarray([[1, 3, 2, -1], [-4, -1, -2, -8]]) * np.float32(scale)
        assert run(x, temperature=temperature).tokens.tolist() == [1, 1]
        assert run(x, temperature=temperature, top_k=2, top_p=0.9, min_p=0.1).tokens.tolist() == [1, 1]


class TestPenalties:
    SEEN = np.asarray([1, 0, 1, 0, 0, 0, 0, 0], bool)
    COUNTS = np.asarray([0, 3, 1, 0, 1, 0, 0, 0])
    LOGITS = np.float32([2.0, 2.15, -1.0, 1.9, 1.0, -3.0, 0.0, -np.inf])

    def penalized(self, repetition=1.0, presence=0.0, frequency=0.0) -> np.ndarray:
        """By hand, token by token."""
        out = self.LOGITS.astype(float).copy()
        for i in range(len(out)):
            if self.SEEN[i] or self.COUNTS[i]:
                out[i] = out[i] / repetition if out[i] > 0 else out[i] * repetition
            if self.COUNTS[i]:
                out[i] -= presence + frequency * self.COUNTS[i]
        return out

    @pytest.mark.parametrize(
        "fields",
        [
            {"repetition": 1.3},
            {"repetition": 3.0},
            {"repetition": 0.5},
            {"repetition": 1e-6},
            {"repetition": 1e6},
            {"presence": 1.5},
            {"presence": -2.0},
            {"frequency": 0.7},
            {"frequency": -0.5},
            {"repetition": 1.2, "presence": 0.3, "frequency": 0.2},
        ],
    )
    def test_tokens_are_chosen_in_the_order_of_the_penalized_logits(self, fields):
        """Greedily, banning each choice before the next."""
        want = self.penalized(**fields)
        given = {f"{name}_penalty": value for name, value in fields.items()}
        order = []
        for _ in range(len(want) - 1):
            token = run(
                [self.LOGITS],
                prompt_seen=[self.SEEN],
                output_counts=[self.COUNTS],
                temperature=0.0,
                has_penalty=True,
                bad_ids=order,
                **given,
            ).tokens[0]
            order.append(int(token))
        assert order == sorted(range(len(want) - 1), key=lambda i: -want[i])

    def test_values(self):
        given = params(1, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.25)
        got = penalize(self.LOGITS[None], given, self.SEEN[None], self.COUNTS[None].astype(np.int16))[0]
        np.testing.assert_allclose(got, self.penalized(1.3, 0.4, 0.25), rtol=1e-6)

    def test_c08_repetition_acts_in_greedy_decoding(self):
        arguments = {
            "prompt_seen": [self.SEEN],
            "output_counts": [self.COUNTS],
            "temperature": 0.0,
            "has_penalty": True,
        }
        assert run([self.LOGITS], **arguments).tokens[0] == 1
        assert run([self.LOGITS], repetition_penalty=1.3, **arguments).tokens[0] == 3

    def test_rows_without_a_penalty_are_left_alone(self):
        """Whatever their slots' counts hold from the request before."""
        rows = np.repeat(self.LOGITS[None], 3, axis=0)
        got = run(
            rows,
            prompt_seen=np.ones(rows.shape),
            output_counts=np.full(rows.shape, 5),
            temperature=0.0,
            repetition_penalty=[1.0, 100.0, 1.0],
            has_penalty=[False, True, False],
        )
        assert got.tokens[[0, 2]].tolist() == [1, 1]

    def test_rows_read_their_own_slots_counts(self):
        seen, counts = np.zeros((4, 4), bool), np.zeros((4, 4), np.int16)
        counts[2, 0], counts[3, 1] = 5, 5
        fields = params(2, temperature=0.0, presence_penalty=50.0, has_penalty=True)
        logits = np.float32([[4, 3, 2, 1]] * 2)
        got = sample(logits, fields, np.zeros(2, np.int32), seen, counts, np.asarray([3, 2], np.int32))
        assert np.asarray(got.tokens).tolist() == [0, 1]


class TestForbidden:
    def test_bad_ids_are_never_taken(self):
        x = floats(8, 16)
        for fields in ({"temperature": 0.0}, {"temperature": 5.0, "seeds": np.arange(8), "draws": 8}):
            assert not np.isin(run(x, bad_ids=[3, 0, 15], **fields).tokens, [3, 0, 15]).any()

    def test_bad_ids_act_on_their_row_only(self):
        fields = params(2, temperature=0.0)
        fields.bad_ids[1, :2] = [1, 2]
        logits = np.float32([[0, 3, 2, 1]] * 2)
        empty = np.zeros((2, 4), bool)
        got = sample(logits, fields, np.zeros(2, np.int32), empty, empty.astype(np.int16), np.arange(2, dtype=np.int32))
        assert np.asarray(got.tokens).tolist() == [1, 3]

    def test_c12_all_stop_ids_wait_for_the_minimum(self):
        x = np.float32([[9, 8, 7, 1, 0]] * 3)
        got = run(x, temperature=0.0, stop_ids=[0, 1], positions=[19, 20, 21], min_positions=20)
        assert got.tokens.tolist() == [2, 0, 0]

    @pytest.mark.parametrize("ids", [[-1, -2], [5, 2**31 - 1], [-(2**31)]])
    def test_c09_ids_outside_the_vocabulary_touch_nobody(self, ids):
        x = floats(3, 5)
        np.testing.assert_array_equal(run(x, temperature=0.0, bad_ids=ids).tokens, x.argmax(-1))


class TestNotFinite:
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a14_a_broken_row_is_reported_and_its_neighbours_stay(self, value, temperature):
        x = floats(5, 64)
        fields = {"temperature": temperature, "seeds": np.arange(5), "wants_logprobs": True, "top_p": 0.9, "top_k": 9}
        whole = run(x, **fields)
        x[1, 60], x[3, 0] = value, value
        broken = run(x, **fields)
        assert broken.tokens[[1, 3]].tolist() == [NOT_FINITE] * 2
        rest = [0, 2, 4]
        np.testing.assert_array_equal(broken.tokens[rest], whole.tokens[rest])
        np.testing.assert_array_equal(broken.logprobs[rest], whole.logprobs[rest])
        np.testing.assert_array_equal(broken.top_logprobs[rest], whole.top_logprobs[rest])

    def test_a_row_without_any_token_is_reported(self):
        x = np.asarray([[-np.inf] * 8, [0.0] * 8])
        assert run(x).tokens[0] == NOT_FINITE
        assert run(x).tokens[1] >= 0

    def test_nan_beside_minus_infinity(self):
        x = np.full((1, 64), -np.inf)
        x[0, 0], x[0, 1] = 1.0, np.nan
        assert run(x).tokens[0] == NOT_FINITE


class TestLogprobs:
    def test_are_the_models_own_and_include_the_chosen_token(self):
        """Case C10: before penalties, temperature and filters, in sampling and in greedy decoding."""
        x = floats(6, 64)
        x[:, 50:] = -np.inf
        want = np.log(np.where(np.isinf(x), 1e-300, softmax(x)))
        got = run(
            x,
            temperature=[0.0, 0.01, 1.0, 5.0, 2.0, 1.0],
            top_p=[1, 0.3, 1, 1, 0.9, 1],
            top_k=[0, 1, 0, 0, 5, 0],
            seeds=np.arange(6),
            repetition_penalty=1.7,
            has_penalty=True,
            prompt_seen=np.ones(x.shape),
            wants_logprobs=True,
        )
        np.testing.assert_allclose(got.logprobs, want[np.arange(6), got.tokens], rtol=1e-5)
        order = np.argsort(-x, axis=-1)[:, :MAX_LOGPROBS]
        np.testing.assert_array_equal(got.top_ids, order)
        np.testing.assert_allclose(got.top_logprobs, np.take_along_axis(want, order, -1), rtol=1e-5)
        assert np.isfinite(got.logprobs).all()
        assert np.isfinite(got.top_logprobs).all()
        assert (got.logprobs < 0).all()

    def test_of_one_possible_token_are_zero_and_finite(self):
        x = np.full((1, 64), -1e30)
        x[0, 7] = 5
        got = run(x, temperature=1.0, wants_logprobs=True)
        assert (got.tokens[0], got.logprobs[0]) == (7, 0)
        assert np.isfinite(got.top_logprobs).all()

    def test_in_a_vocabulary_smaller_than_their_number(self):
        got = run([[1.0, 0.0, 2.0]], padded=False, temperature=0.0, wants_logprobs=True)
        assert got.top_ids[0, :3].tolist() == [2, 0, 1]
        assert np.isfinite(got.top_logprobs).all()

    def test_that_nobody_wants_are_zeros(self):
        got = run(floats(2, 64))
        assert not got.logprobs.any()
        assert not got.top_logprobs.any()
