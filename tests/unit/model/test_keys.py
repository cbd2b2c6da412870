"""Keys: the same everywhere and forever, and different if KV may differ."""

from __future__ import annotations

import hashlib
import os
import random
import struct
import subprocess
import sys
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.model import keys as keys_module
from kvstore.model.chunks import ChunkRef, chunk_of, is_trail_of
from kvstore.model.errors import InvalidCallError
from kvstore.model.keys import NO_EXTRAS, Feature, KeyExtras, Namespace, PrefixHasher

TOKENS = [7, 0, 4_294_967_294, 15, 16, 23, 42, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
EVERYTHING = KeyExtras(
    lora=("adapter", "f00d"),
    cache_salt="salz",
    tags=(("tier", "gold"), ("region", "eu")),
    features=(Feature("image-1", 5, 4),),
)


def hasher_of(tokens: list[int], extras: KeyExtras = NO_EXTRAS, chunk: int = 8, block: int = 2) -> PrefixHasher:
    hasher = PrefixHasher(chunk, block, extras)
    hasher.update(tokens)
    return hasher


def keys_of(tokens: list[int], extras: KeyExtras = NO_EXTRAS, chunk: int = 8, block: int = 2) -> list[bytes]:
    """Return every block key, of whole and unfinished chunks alike."""
    hasher = hasher_of(tokens, extras, chunk, block)
    return [key for number in range(len(tokens) // chunk + 1) for key in hasher.block_keys(number)]


# Golden values: when one of these changes, every cache in the field is lost, and the format version must change with it


def test_golden_keys() -> None:
    assert [key.hex() for key in hasher_of(TOKENS).chunk_keys()] == GOLDEN_PLAIN
    assert [key.hex() for key in hasher_of(TOKENS, EVERYTHING).chunk_keys()] == GOLDEN_EVERYTHING
    assert [key.hex() for key in hasher_of(TOKENS).block_keys(2)] == GOLDEN_TAIL


GOLDEN_PLAIN = ["4ba425c389633c7379c730a369dd36e3", "eb7f874db9effbda3c9dce1174359cf5"]
GOLDEN_EVERYTHING = ["caed560f39e7cd8226c75aa7ec537585", "642fcf322e8c5832bc42294c5b2a1c87"]
GOLDEN_TAIL = ["0d496f32aec09af2e02206c46c961e7d"]


def test_a_key_is_what_the_format_says() -> None:
    text = struct.pack("<I", 9) + b"kvstore/1" + struct.pack("<8I", *TOKENS[:8])
    assert hasher_of(TOKENS).chunk_keys()[0] == hashlib.sha256(text).digest()[:16]
    seed = b"kvstore/1" + b"".join(
        struct.pack("<I", len(part)) + part
        for part in (b"lora", b"adapter", b"f00d", b"salt", b"salz", b"tag", b"region", b"eu", b"tag", b"tier", b"gold")
    )
    image = b"\xff\xff\xff\xff" + struct.pack("<I", 7) + b"image-1" + struct.pack("<Q", 5)
    text = struct.pack("<I", len(seed)) + seed
    for begin in range(0, 8, 2):
        text += struct.pack("<2I", *TOKENS[begin : begin + 2]) + (image if begin >= 4 else b"")
    assert hasher_of(TOKENS, EVERYTHING).chunk_keys()[0] == hashlib.sha256(text).digest()[:16]


def test_namespace_id_is_golden_and_independent_of_order() -> None:
    one = Namespace({"model": "llama-8b@main", "chunk": 256, "ü": "ß"})
    other = Namespace({"ü": "ß", "chunk": 256, "model": "llama-8b@main"})
    assert one.id == other.id
    assert one.id.hex() == GOLDEN_NAMESPACE
    assert len(one.id) == 8


GOLDEN_NAMESPACE = "0bb4a2c21ddf3447"


def test_namespaces_differ_by_named_fields() -> None:
    one = Namespace({"model": "a", "chunk": 256, "dtype": "bf16"})
    other = Namespace({"model": "b", "chunk": "256", "shard": 0, "dtype": "bf16"})
    assert one.differing_fields(other) == ["chunk", "model", "shard"]
    assert one.differing_fields(one) == []
    assert one.id != other.id
    assert Namespace({"chunk": 256}).id != Namespace({"chunk": "256"}).id


_PRINT_KEYS = """
import sys
sys.modules["vllm"] = None
sys.modules["torch"] = None
from kvstore.model.keys import Feature, KeyExtras, Namespace, PrefixHasher
tokens = list(range(1, 100))
extras = KeyExtras(("a", "b"), "s", (("x", "1"), ("w", "2")), (Feature("i", 3, 40),))
for some in (KeyExtras(), extras):
    hasher = PrefixHasher(32, 4, some)
    hasher.update(tokens)
    print([key.hex() for number in range(4) for key in hasher.block_keys(number)])
print(Namespace({"b": 1, "a": "x"}).id.hex())
"""


@pytest.mark.slow
def test_processes_agree_whatever_their_hash_seed_and_without_vllm() -> None:
    scripts = {"0": _PRINT_KEYS, "1234": _PRINT_KEYS.replace('sys.modules["torch"] = None', "")}
    answers = []
    for seed, script in scripts.items():
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        answers.append(subprocess.check_output([sys.executable, "-c", script], env=environment, text=True, timeout=120))
    extras = KeyExtras(("a", "b"), "s", (("x", "1"), ("w", "2")), (Feature("i", 3, 40),))
    tokens = list(range(1, 100))
    here = [[key.hex() for key in keys_of(tokens, some, 32, 4)] for some in (NO_EXTRAS, extras)]
    assert answers[0] == answers[1] == f"{here[0]}\n{here[1]}\n{Namespace({'a': 'x', 'b': 1}).id.hex()}\n"


# Growth


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_growth_in_steps_equals_all_at_once(data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, 2**32 - 2), max_size=40))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=6)))
    extras = data.draw(st.sampled_from([NO_EXTRAS, EVERYTHING]))
    hasher = PrefixHasher(8, 2, extras)
    for cut in [*cuts, len(tokens)]:
        hasher.update(tokens[:cut])
        assert hasher.num_tokens == cut
        hasher.block_keys(cut // 8)  # looking must not change anything
    assert list(hasher.chunk_keys()) == list(hasher_of(tokens, extras).chunk_keys())
    assert [hasher.block_keys(n) for n in range(7)] == [hasher_of(tokens, extras).block_keys(n) for n in range(7)]


def test_growth_token_by_token() -> None:
    hasher = PrefixHasher(8, 2, EVERYTHING)
    for end in range(len(TOKENS) + 1):
        hasher.update(TOKENS[:end])
        assert list(hasher.chunk_keys()) == list(hasher_of(TOKENS[:end], EVERYTHING).chunk_keys())
    assert len(hasher.chunk_keys()) == 2


@pytest.mark.parametrize("at", [0, 3, 9, 15, 16])
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("kind", [list, tuple, array])
def test_a_sequence_that_differs_anywhere_is_hashed_anew(*, at: int, grows: bool, kind: type) -> None:
    """It has the same length and last token, but other tokens, so other keys."""
    other = [*TOKENS[:17], 5]
    hasher = hasher_of([*TOKENS[:17], 5])
    other[at] += 1
    if grows:
        other += range(20)
    hasher.update(array("I", other) if kind is array else kind(other))
    assert list(hasher.chunk_keys()) == list(hasher_of(other).chunk_keys())
    assert hasher.block_keys(2) == hasher_of(other).block_keys(2)


def test_a_sequence_that_changed_where_it_is_and_grew_is_hashed_anew() -> None:
    tokens = list(TOKENS)
    hasher = hasher_of(tokens)
    tokens[1] += 1
    tokens.append(7)
    hasher.update(tokens)
    assert list(hasher.chunk_keys()) == list(hasher_of(list(tokens)).chunk_keys())


def test_tokens_that_are_none_leave_what_was_known() -> None:
    hasher = hasher_of(TOKENS)
    before = list(hasher.chunk_keys())
    with pytest.raises(InvalidCallError):
        hasher.update([*TOKENS, -1])
    assert (hasher.num_tokens, list(hasher.chunk_keys())) == (len(TOKENS), before)
    hasher.update([*TOKENS, 7])
    assert list(hasher.chunk_keys()) == list(hasher_of([*TOKENS, 7]).chunk_keys())


def test_truncated_and_replaced_sequences_are_hashed_anew() -> None:
    hasher = hasher_of(TOKENS)
    shorter, other = TOKENS[:10], [*TOKENS[:10], 99, 98, 97, 96, 95, 94, 93, 92]
    hasher.update(shorter)
    assert [hasher.num_tokens, *hasher.chunk_keys()] == [10, *hasher_of(shorter).chunk_keys()]
    hasher.update(TOKENS)
    hasher.update(other)  # as long, but its last known token is another
    assert list(hasher.chunk_keys()) == list(hasher_of(other).chunk_keys())
    hasher.reset()
    assert (hasher.num_tokens, list(hasher.chunk_keys()), hasher.block_keys(0)) == (0, [], [])


def test_block_keys_asked_for_again_are_those_of_the_tokens_now() -> None:
    hasher = PrefixHasher(8, 4)
    for tokens in ([1] * 6, [2] * 6, [2] * 8, [3] * 8, [3] * 8 + [4] * 4, [3] * 8 + [5] * 4):
        hasher.update(tokens)
        for chunk in (1, 0, 0, 1, 1):
            fresh = PrefixHasher(8, 4)
            fresh.update(tokens)
            assert hasher.block_keys(chunk) == fresh.block_keys(chunk)


def test_block_keys_and_chunk_keys_fit_together() -> None:
    for extras in (NO_EXTRAS, EVERYTHING):
        hasher = hasher_of(TOKENS, extras)
        assert [hasher.block_keys(n)[-1] for n in range(2)] == list(hasher.chunk_keys())
        assert [len(hasher.block_keys(n)) for n in range(4)] == [4, 4, 1, 0]
        assert hasher_of(TOKENS[:17], extras).block_keys(2) == []  # half a block has no key
        assert len(set(keys_of(TOKENS, extras))) == 9


def test_block_keys_are_those_of_another_chunk_size() -> None:
    """Without features the boundaries of chunks do not enter the hash."""
    assert keys_of(TOKENS, chunk=8) == keys_of(TOKENS, chunk=4)
    assert list(hasher_of(TOKENS, chunk=2).chunk_keys()) == keys_of(TOKENS)


# What must differ


def test_extras_change_every_key() -> None:
    variants = [
        NO_EXTRAS,
        KeyExtras(cache_salt="a"),
        KeyExtras(cache_salt="b"),
        KeyExtras(lora=("a", "1")),
        KeyExtras(lora=("a", "2")),
        KeyExtras(lora=("b", "1")),
        KeyExtras(tags=(("a", "1"),)),
        KeyExtras(tags=(("a", "2"),)),
        KeyExtras(tags=(("b", "1"),)),
        KeyExtras(cache_salt="a", lora=("a", "1")),
        EVERYTHING,
    ]
    keys = [key for extras in variants for key in keys_of(TOKENS, extras)]
    assert len(set(keys)) == len(keys)


def test_order_of_tags_and_an_empty_salt_do_not_matter() -> None:
    one, other = KeyExtras(tags=(("a", "1"), ("b", "2"))), KeyExtras(tags=(("b", "2"), ("a", "1")))
    assert keys_of(TOKENS, one) == keys_of(TOKENS, other)
    assert keys_of(TOKENS, KeyExtras(cache_salt="")) == keys_of(TOKENS)


def test_length_prefixes_keep_neighbours_apart() -> None:
    seeds = [
        KeyExtras(lora=("ab", "c")),
        KeyExtras(lora=("a", "bc")),
        KeyExtras(lora=("abc", "")),
        KeyExtras(lora=("", "abc")),
        KeyExtras(tags=(("ab", "c"),)),
        KeyExtras(tags=(("a", "bc"),)),
        KeyExtras(tags=(("a", "b"), ("c", ""))),
        KeyExtras(cache_salt="salt"),
        KeyExtras(tags=(("salt", "salt"),)),
        KeyExtras(lora=("salt", "salt")),
        KeyExtras(lora=("a", "b"), cache_salt="c"),
        KeyExtras(cache_salt="\x04\0\0\0lora\x01\0\0\0a\x01\0\0\0b"),
    ]
    assert len({extras.seed() for extras in seeds}) == len(seeds)
    for extras in seeds:  # the seed announces its own length, so no seed is another with tokens behind it
        assert struct.unpack("<I", extras.seed()[:4])[0] == len(extras.seed()) - 4


_WORDS = st.text("ab\0é", max_size=4)  # few letters, so that some are equal
_EXTRAS = st.builds(
    KeyExtras,
    lora=st.none() | st.tuples(_WORDS, _WORDS),
    cache_salt=st.none() | _WORDS.filter(bool),
    tags=st.lists(st.tuples(_WORDS, _WORDS), max_size=3, unique=True).map(lambda tags: tuple(sorted(tags))),
)


@settings(max_examples=60, deadline=None)
@given(_EXTRAS, _EXTRAS)
def test_different_extras_have_different_seeds(one: KeyExtras, other: KeyExtras) -> None:
    assert (one.seed() == other.seed()) == (one == other)


def test_a_feature_changes_keys_from_its_first_block_on() -> None:
    plain = keys_of(TOKENS)
    one = keys_of(TOKENS, KeyExtras(features=(Feature("one", 5, 4),)))  # tokens 5..8: blocks 2, 3 and 4
    two = keys_of(TOKENS, KeyExtras(features=(Feature("two", 5, 4),)))
    moved = keys_of(TOKENS, KeyExtras(features=(Feature("one", 4, 5),)))
    for keys in (one, two, moved):
        assert keys[:2] == plain[:2]
    assert all(len(set(keys)) == 4 for keys in list(zip(plain, one, two, moved, strict=True))[2:])


@pytest.mark.parametrize(
    ("offset", "length", "first"), [(0, 1, 0), (1, 1, 0), (2, 1, 1), (7, 2, 3), (8, 1, 4), (16, 2, 8)]
)
def test_the_first_block_of_a_feature_is_exact(offset: int, length: int, first: int) -> None:
    plain, featured = keys_of(TOKENS), keys_of(TOKENS, KeyExtras(features=(Feature("f", offset, length),)))
    assert [a == b for a, b in zip(plain, featured, strict=True)] == [n < first for n in range(9)]


def test_a_feature_cannot_be_imitated_by_tokens() -> None:
    """The record of a feature begins with a word that is refused as a token."""
    with pytest.raises(InvalidCallError, match="reserved"):
        PrefixHasher(8, 2).update([1, 0xFFFFFFFF])


def test_two_features_in_one_block_are_not_one_with_both_names() -> None:
    def keys(*features: Feature) -> list[bytes]:
        return keys_of(TOKENS, KeyExtras(features=features))[-1:]

    found = [keys(Feature("a", 0, 1), Feature("b", 1, 1)), keys(Feature("ab", 0, 2)), keys(Feature("a", 0, 2))]
    assert len({key for (key,) in found}) == 3


def test_one_token_changes_all_keys_behind_it() -> None:
    rng = random.Random(1)
    for _ in range(20):
        tokens = [rng.randrange(1000) for _ in range(18)]
        at = rng.randrange(18)
        changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
        same = [a == b for a, b in zip(keys_of(tokens), keys_of(changed), strict=True)]
        assert same == [n < at // 2 for n in range(9)]


# Bad input


@pytest.mark.parametrize("bad", [[1, -1], [1, 2**32], [1.5], ["a"], [None], [[1]], [1, 2**70]])
def test_bad_tokens(bad: list[int]) -> None:
    hasher = hasher_of([1, 2, 3, 4, 5, 6, 7, 8])
    good = list(hasher.chunk_keys())
    with pytest.raises(InvalidCallError):
        hasher.update([1, 2, 3, 4, 5, 6, 7, 8, *bad])
    assert (hasher.num_tokens, list(hasher.chunk_keys())) == (8, good)


@pytest.mark.parametrize(("chunk", "block"), [(10, 4), (8, 0), (8, -2)])
def test_bad_sizes(chunk: int, block: int) -> None:
    with pytest.raises(InvalidCallError, match="multiple"):
        PrefixHasher(chunk, block)


# What features cost


def plain_keys(tokens: list[int], extras: KeyExtras, chunk: int, block: int) -> tuple[list[bytes], list[list[bytes]]]:
    """Return the keys by the plain rule: at the end of a block, every feature that overlaps it, in order.

    The result has the keys of whole chunks, and for each chunk those of its blocks.
    """
    running = hashlib.sha256(extras.seed())
    chunk_keys: list[bytes] = []
    block_keys: list[list[bytes]] = [[]]
    for begin in range(0, len(tokens) - block + 1, block):
        end = begin + block
        running.update(struct.pack(f"<{block}I", *tokens[begin:end]))
        for identifier, offset, length in extras.features:
            if offset < end and offset + length > begin:
                name = identifier.encode()
                running.update(b"\xff\xff\xff\xff" + struct.pack("<I", len(name)) + name + struct.pack("<Q", offset))
        block_keys[-1].append(running.digest()[:16])
        if end % chunk == 0:
            chunk_keys.append(block_keys[-1][-1])
            block_keys.append([])
    return chunk_keys, block_keys


@given(
    tokens=st.lists(st.integers(0, 9), max_size=80),
    features=st.lists(
        st.builds(Feature, st.sampled_from(["", "a", "ab", "b"]), st.integers(0, 90), st.integers(0, 90)), max_size=6
    ),
    block=st.sampled_from([1, 2, 4]),
    steps=st.lists(st.integers(0, 80), max_size=5),
)
def test_keys_with_features_are_what_the_rule_says(
    tokens: list[int], features: list[Feature], block: int, steps: list[int]
) -> None:
    """Features may be in any order, overlap, be empty or beyond the end; the sequence may grow, or be cut and grow."""
    extras = KeyExtras(features=tuple(features))
    hasher = PrefixHasher(8, block, extras)
    for length in [*steps, len(tokens)]:
        hasher.update(tokens[:length])
        chunk_keys, block_keys = plain_keys(tokens[:length], extras, 8, block)
        assert list(hasher.chunk_keys()) == chunk_keys
        assert [hasher.block_keys(number) for number in range(len(chunk_keys) + 1)] == block_keys
        assert hasher.block_keys(len(chunk_keys) + 1) == []


class CountedSpan(keys_module._Span):
    """Span of a feature that counts how often its blocks are read."""

    looks = 0

    def __getattribute__(self, name: str) -> object:
        CountedSpan.looks += 1
        return super().__getattribute__(name)


def test_a_block_does_not_look_at_every_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 images in 128k tokens would hold up the scheduler for a second."""
    monkeypatch.setattr(keys_module, "_Span", CountedSpan)
    monkeypatch.setattr(CountedSpan, "looks", 0)
    num_features = 200
    features = tuple(Feature(f"image {number}", 16 * number, 8) for number in range(num_features))
    hasher = PrefixHasher(16, 4, KeyExtras(features=features))
    hasher.update([1] * 3_200)
    for length in range(3_200, 3_300):
        hasher.update([1] * length)
        hasher.block_keys(200)
    assert 0 < CountedSpan.looks <= 20 * num_features
    assert hasher.chunk_keys() == plain_keys([1] * 3_299, KeyExtras(features=features), 16, 4)[0]


def test_a_trail_belongs_to_a_chunk_of_its_length_that_ends_with_its_key() -> None:
    trail = bytes(range(32))
    assert is_trail_of(trail, chunk_of(trail))
    assert chunk_of(trail) == ChunkRef(trail[16:], 2)
    for other in (ChunkRef(trail[16:], 1), ChunkRef(trail[16:], 3), ChunkRef(trail[:16], 2)):
        assert not is_trail_of(trail, other)


@pytest.mark.parametrize("num_blocks", [2, 6, 11])
def test_the_trail_of_a_tail_is_known_when_the_sequence_has_grown(num_blocks: int) -> None:
    """A prompt's tail may be stored after tokens were sampled. Without a trail it is found by its own end only."""
    hasher = PrefixHasher(16, 4)
    hasher.update(list(range(4 * num_blocks)))
    chunk, trail = num_blocks // 4, hasher.trail(num_blocks // 4)
    key, before = trail[-16:], b"".join(hasher.chunk_keys()[chunk - 1 : chunk])
    for num_tokens in (4 * num_blocks, 60, 100):
        hasher.update(list(range(num_tokens)))
        assert hasher.trails([key], before) == {key: trail}
    assert hasher.trails([bytes(16)], before) == {}
