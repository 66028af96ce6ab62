import pytest

from pretrain.data.places import expand_places, relative_names
from pretrain.errors import UserError


def test_braces() -> None:
    assert expand_places(["s3://b/x-{08..11}.tar", "{a,c}.tar"], "S") == [
        *("a.tar", "c.tar", "s3://b/x-08.tar", "s3://b/x-09.tar", "s3://b/x-10.tar", "s3://b/x-11.tar"),
    ]
    assert expand_places([r"odd\{1..2\}.tar"], "S") == ["odd{1..2}.tar"]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["pipe:touch trapped"], "pipe: is not supported; give a path, or a URL of file, http, https or s3"),
        (["{pipe,x}:touch trapped"], "pipe: is not supported"),
        (["a-{1..2.tar"], "S=a-{1..2.tar: the braces do not match"),
        (["a-{0..9999999999}.tar"], "S=a-{0..9999999999}.tar: braces that name more than 1000000 shards"),
        (["{0..2000}-{0..2000}"], "S names more than 1000000 shards"),
        (["a.tar", "{a,b}.tar"], "S names a.tar twice"),
    ],
)
def test_what_cannot_be_named(named: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        expand_places(named, "S")
    assert message in str(caught.value)


def test_the_names_stay_when_all_shards_move() -> None:
    here = expand_places(["/data/web/{a,b}/0.tar", "/data/web/c.tar"], "S")
    there = expand_places(["https://user:pw@host/w/{a,b}/0.tar?token=1", "https://user:pw@host/w/c.tar?token=1"], "S")
    assert relative_names(here) == relative_names(there) == ["a/0.tar", "b/0.tar", "c.tar"]
    assert relative_names(["/data/a.tar"]) == ["a.tar"]
    assert relative_names(["a.tar", "b/a.tar"]) == ["a.tar", "b/a.tar"]
