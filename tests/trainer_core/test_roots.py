"""What lies outside of the allowed folders is refused, at its field, and is not even looked at."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FIXTURE, fixture_settings
from trainer_core.config_checks import ConfigError, validate
from trainer_core.roots import ANYWHERE, Roots
from trainer_core.sources import SourceError

FIELDS = ("model.source", "dataset.source", "start_from", "resume_from")


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    """Two allowed folders, and others around them."""
    for name in ("data/inner", "models", "data_evil", "secret"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "data" / "out").symlink_to(tmp_path / "secret")
    (tmp_path / "data" / "loop").symlink_to(tmp_path / "data" / "loop")
    (tmp_path / "data" / "side").symlink_to(tmp_path / "models")
    (tmp_path / "alias").symlink_to(tmp_path / "data")
    return Roots((tmp_path / "data", tmp_path / "models"))


@pytest.mark.parametrize("path", ["data", "data/inner", "data/none/yet", "data/inner/../inner", "data/side", "models"])
def test_what_lies_inside_is_taken(path: str, roots: Roots, tmp_path: Path) -> None:
    roots.check(f"{tmp_path}/{path}")


@pytest.mark.parametrize(
    "path",
    [
        "data/../secret",
        "data/inner/../../secret",
        "data_evil",
        "data/out",
        "data/out/deeper",
        "data/loop/x",
        "data/side/../secret",
        "secret",
        "alias/inner",
        "",
        "data/\0",
    ],
)
def test_what_leads_outside_is_refused(path: str, roots: Roots, tmp_path: Path) -> None:
    """H2."""
    with pytest.raises(
        SourceError,
        match=r"outside the folders that this server may read: .*data, .*models. .* start Descant with --allow",
    ):
        roots.check(f"{tmp_path}/{path}")


@pytest.mark.parametrize(
    "name", ["config.json", "0.pt", "adapter_model.safetensors", "adapter", "transformer", "transformer/x.json"]
)
def test_a_link_among_the_files_that_are_read_is_followed_too(name: str, roots: Roots, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "model"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(tmp_path / "models")
    roots.check(str(folder))
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(SourceError, match="links to, something outside"):
        roots.check(str(folder))


def test_an_allowed_folder_may_be_a_link_and_is_meant_by_either_name(roots: Roots, tmp_path: Path) -> None:
    through_link = Roots((tmp_path / "alias",))
    through_link.check(str(tmp_path / "alias" / "inner"))
    through_link.check(str(tmp_path / "data" / "inner"))
    with pytest.raises(SourceError):
        through_link.check(str(tmp_path / "alias" / "out"))


def test_a_path_that_is_written_outside_is_not_looked_at(
    roots: Roots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows, looking at \\\\server\\share signs in to that server."""
    looked_at: list[str] = []
    for name in ("resolve", "stat", "lstat", "is_dir", "is_file", "exists", "iterdir", "open"):
        monkeypatch.setattr(Path, name, spy(getattr(Path, name), looked_at))
    outside = str(tmp_path / "secret" / "x")
    for field in FIELDS:
        with pytest.raises(ConfigError):
            validate(settings(field, outside), roots)
    assert looked_at  # the roots were
    assert not any("secret" in path for path in looked_at)


def spy(method: Callable[..., Any], looked_at: list[str]) -> Callable[..., Any]:
    def spying(self: Path, *arguments: Any, **options: Any) -> Any:
        looked_at.append(str(self))
        return method(self, *arguments, **options)

    return spying


def settings(field: str, value: object, **more: Any) -> dict[str, Any]:
    section, _, key = field.rpartition(".")
    return more | ({section: {key: value}} if section else {key: value})


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("given", ["{secret}", " {secret} ", "'{secret}'", '"{secret}"', "{data}/../secret", "~root/x"])
def test_the_refusal_stands_at_the_field_with_all_else_that_is_wrong(
    field: str, given: str, roots: Roots, tmp_path: Path
) -> None:
    """F2."""
    path = given.format(secret=tmp_path / "secret", data=tmp_path / "data")
    with pytest.raises(ConfigError) as caught:
        validate(settings(field, path, training={"epochs": 0}), roots)
    assert set(caught.value.fields) == {field, "training.epochs"}
    assert "--allow" in caught.value.fields[field]


def test_a_second_field_of_the_same_name_does_not_hide_the_first(roots: Roots, tmp_path: Path) -> None:
    asked = {"model": {"source": str(tmp_path / "secret")}, "model.source": "demo"}
    with pytest.raises(ConfigError) as caught:
        validate(asked, roots)
    assert "--allow" in caught.value.fields["model.source"]


def test_the_demo_hub_ids_and_allowed_folders_start_a_run(roots: Roots, tmp_path: Path) -> None:
    """F2: allowed once a root is added."""
    assert validate({}, roots).model.source == "demo"
    assert validate({"model": {"source": "owner/name"}}, roots).model.source == "owner/name"
    shutil.copytree(FIXTURE / "tensors", tmp_path / "data" / "tensors")
    assert validate({"dataset": {"source": str(tmp_path / "data" / "tensors")}}, roots)
    with pytest.raises(ConfigError, match="--allow"):
        validate(fixture_settings(), roots)
    assert validate(fixture_settings(), Roots((FIXTURE,)))
    assert validate(fixture_settings(), ANYWHERE)
