"""The hash functions behind hash bins, written down a second time from their papers and sources."""

from __future__ import annotations

_MASK = 2**64 - 1
_K0, _K2 = 0xC3A5C85C97CB3127, 0x9AE16A3B2F90404F


def farmhash64(text: bytes) -> int:
    """FarmHash's Fingerprint64 of at most 16 bytes (farmhashna::HashLen0to16)."""
    size = len(text)
    assert size <= 16
    mul = _K2 + size * 2
    if size >= 8:
        a, b = _fetch(text, 0, 8) + _K2 & _MASK, _fetch(text, size - 8, 8)
        c = _rotate(b, 37) * mul + a & _MASK
        return _mix(c, (_rotate(a, 25) + b) * mul & _MASK, mul)
    if size >= 4:
        return _mix(size + (_fetch(text, 0, 4) << 3), _fetch(text, size - 4, 4), mul)
    if size:
        y, z = text[0] + (text[size >> 1] << 8), size + (text[-1] << 2)
        value = (y * _K2 ^ z * _K0) & _MASK
        return (value ^ value >> 47) * _K2 & _MASK
    return _K2


def siphash64(text: bytes, key: int) -> int:
    """SipHash-2-4 (J.-P. Aumasson, D. J. Bernstein, 2012) with both halves of the key the same."""
    constants = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
    state = [constant ^ key for constant in constants]
    words = text.ljust(len(text) // 8 * 8 + 7, b"\0") + bytes([len(text) % 256])
    for start in range(0, len(words), 8):
        word = _fetch(words, start, 8)
        state[3] ^= word
        _sip_round(_sip_round(state))
        state[0] ^= word
    state[2] ^= 0xFF
    for _ in range(4):
        _sip_round(state)
    return state[0] ^ state[1] ^ state[2] ^ state[3]


def _sip_round(v: list[int]) -> list[int]:
    for (a, b, turn, swaps), (c, d, other, _) in (
        (((0, 1, 13, True)), (2, 3, 16, False)),
        (((2, 1, 17, True)), (0, 3, 21, False)),
    ):
        v[a], v[c] = v[a] + v[b] & _MASK, v[c] + v[d] & _MASK
        v[b], v[d] = _left(v[b], turn) ^ v[a], _left(v[d], other) ^ v[c]
        if swaps:
            v[a] = _left(v[a], 32)
    return v


def _fetch(text: bytes, start: int, size: int) -> int:
    return int.from_bytes(text[start : start + size], "little")


def _rotate(value: int, by: int) -> int:
    return (value >> by | value << 64 - by) & _MASK


def _left(value: int, by: int) -> int:
    return (value << by | value >> 64 - by) & _MASK


def _mix(u: int, v: int, mul: int) -> int:
    a = (u ^ v) * mul & _MASK
    b = (v ^ a ^ a >> 47) * mul & _MASK
    return (b ^ b >> 47) * mul & _MASK
