"""Quantities and kinds as people read them: numbers of things, types, bytes, times."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Formats a number of things.

    >>> counted(1, "device"), counted(8, "device"), counted(2, "copy", "copies")
    ('1 device', '8 devices', '2 copies')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def there_are(number: int, noun: str) -> str:
    """Says how many things there are.

    >>> there_are(1, "replica"), there_are(0, "rank")
    ('there is 1 replica', 'there are 0 ranks')
    """
    return f"there {'is' if number == 1 else 'are'} {counted(number, noun)}"


def with_article(noun: str) -> str:
    """Puts "a" or "an" before a noun.

    >>> with_article("int"), with_article("ndarray"), with_article("UserDict"), with_article("tuple")
    ('an int', 'an ndarray', 'a UserDict', 'a tuple')
    """
    sounds_like_vowel = noun.startswith((*"aeioAEIO", "un", "Un", "ndarray"))
    return f"{'an' if sounds_like_vowel else 'a'} {noun}"


def kind_text(thing: object) -> str:
    """Names the type of an object, with its article.

    >>> kind_text(3), kind_text("3")
    ('an int', 'a str')
    """
    return with_article(type(thing).__name__)


def size_text(num_bytes: int) -> str:
    """Formats bytes in powers of two.

    >>> size_text(512), size_text(1536), size_text(1000 << 20)
    ('512 B', '1.5 KiB', '1000 MiB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.4g} {unit}"
    return f"{num_bytes} B"


def time_text(seconds: float) -> str:
    """Formats a time to three digits.

    >>> time_text(0.0168), time_text(1.23e-6), time_text(75.0), time_text(0.0009999)
    ('16.8 ms', '1.23 us', '75 s', '1 ms')
    """
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        shown = f"{seconds * factor:.3g}"
        if float(shown) < 1000:
            return f"{shown} {unit}"
    return f"{seconds:.3g} s"
