import pytest

from fw.config import format_size, parse_size
from fw.errors import UserError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("7", 7),
        (9, 9),
        ("2TiB", 2 * 2**40),
        ("0.5KiB", 512),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["24 gigs", "GiB", "-1GiB", "", "1GiBB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UserError, match="is not a size"):
        parse_size(text)


def test_sizes_for_people():
    assert [format_size(n) for n in (0, 1023, 1024, 3 * 2**29, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 GiB",
        "5 TiB",
    ]
