"""A random order that is a function of a seed and a place, and stored nowhere."""


def mix(*numbers: int) -> int:
    """64 well-mixed bits of the numbers: the finaliser of SplitMix64 (Steele et al., OOPSLA 2014), once per number."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


def shuffled(place: int, size: int, key: int) -> int:
    """Return where a random permutation of range(size), chosen by `key`, sends `place`, without storing the
    permutation.

    Four rounds of a balanced Feistel network (Luby and Rackoff 1988) permute the next power of four. A result outside
    range(size) goes in once more until it is inside (Black and Rogaway 2002, "cycle walking").
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(4):
            left, right = right, left ^ (mix(key, turn, right) & mask)
        place = left << half | right
        if place < size:
            return place
