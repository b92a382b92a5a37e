"""References to models and the tree of errors."""

from __future__ import annotations

import builtins
import inspect
import io
import pickle
import re
import string
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.actors import Saved
from tensorvine.store import errors
from tensorvine.store.errors import InvalidNameError, TensorVineError
from tensorvine.store.refs import ModelRef, check_name, split_ref

LETTERS = string.ascii_letters + string.digits + "._-/"
BUILTINS = {
    "ModelNotFoundError": KeyError,
    "TensorNotFoundError": KeyError,
    "GraphError": ValueError,
    "InvalidNameError": ValueError,
    "TensorMismatchError": ValueError,
    "CorruptDataError": OSError,
    "ShardUnavailableError": ConnectionError,
    "ModelLostError": LookupError,
    "RepositoryNotFoundError": LookupError,
    "OperationTimeoutError": TimeoutError,
}
ERRORS = [error for _, error in inspect.getmembers(errors, inspect.isclass) if error is not TensorVineError]


def legal(name: str) -> bool:
    """The contract's words, as plainly as they can be written."""
    parts = name.split("/")
    return 1 <= len(name) <= 200 and set(name) <= set(LETTERS) and parts[0] != "" and ".." not in parts


names = st.text(LETTERS, min_size=1, max_size=200).filter(legal)
versions = st.integers(1, 10**18 - 1)
refs = st.builds(ModelRef, names, versions)


class TestNames:
    @given(st.text(max_size=8) | st.text("ab./", max_size=8) | st.text(LETTERS, min_size=198, max_size=202))
    def test_a_name_is_taken_exactly_when_the_contract_allows_it(self, name: str) -> None:
        if legal(name):
            assert check_name(name) == name
        else:
            with pytest.raises(InvalidNameError, match=re.escape(repr(name))):
                check_name(name)

    @pytest.mark.parametrize("name", ["a", "a..b", "...", "a/", "a//b", ".hidden", "-", "x" * 200])
    def test_unusual_names_are_legal(self, name: str) -> None:
        assert check_name(name) == name

    @pytest.mark.parametrize(
        "name", ["", "/a", "..", "../a", "a/..", "a/../b", "a\n", "ä", "a b", "a@1", "\u0661", "x" * 201]
    )
    def test_malformed_names_are_refused_with_the_rule(self, name: str) -> None:
        with pytest.raises(InvalidNameError, match=r"expected 1 to 200 characters.*found"):
            check_name(name)

    @pytest.mark.parametrize("name", [None, 3, b"a", ["a"]])
    def test_what_is_no_string_is_refused_by_type(self, name: object) -> None:
        with pytest.raises(InvalidNameError, match=f"found {type(name).__name__}"):
            check_name(name)


class TestReferences:
    @given(refs)
    def test_the_text_of_a_reference_reads_back(self, ref: ModelRef) -> None:
        assert str(ref) == f"{ref.name}@{ref.version}"
        assert ModelRef.parse(str(ref)) == ref
        assert split_ref(str(ref)) == split_ref(ref) == (ref.name, ref.version)
        assert split_ref(ref.name) == (ref.name, None)

    @given(refs, refs)
    def test_order_and_hash_are_those_of_name_and_version(self, one: ModelRef, two: ModelRef) -> None:
        assert (one < two) == ((one.name, one.version) < (two.name, two.version))
        assert (one == two) == (str(one) == str(two))
        assert hash(ModelRef(one.name, one.version)) == hash(one)

    def test_versions_are_ordered_as_numbers(self) -> None:
        assert ModelRef("a", 9) < ModelRef("a", 10) < ModelRef("b", 1)

    def test_a_reference_is_frozen_and_travels(self) -> None:
        ref = ModelRef("digits", 3)
        with pytest.raises(AttributeError):
            ref.version = 4  # type: ignore[misc]
        assert pickle.loads(pickle.dumps(ref)) == ref  # noqa: S301 - written one line above

    @pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None])
    def test_a_version_is_an_integer_from_1(self, version: object) -> None:
        with pytest.raises(
            InvalidNameError, match=f"expected an integer of at least 1; found {re.escape(repr(version))}"
        ):
            ModelRef("m", version)  # type: ignore[arg-type]

    def test_an_answer_about_a_version_stands_for_it(self) -> None:
        ref = ModelRef("m", 3)
        assert split_ref(Saved(ref, 0, 0)) == ("m", 3)
        with pytest.raises(InvalidNameError, match=r"one as \.ref.*found SimpleNamespace"):
            split_ref(SimpleNamespace(ref="m@3"))  # type: ignore[arg-type]

    def test_a_reference_prints_short(self) -> None:
        assert repr([ModelRef("a/b", 12)]) == "[ModelRef('a/b@12')]"

    def test_a_reference_checks_its_name(self) -> None:
        with pytest.raises(InvalidNameError, match="model name"):
            ModelRef("/m", 1)

    @pytest.mark.parametrize(
        "text", ["m@", "m@0", "m@01", "m@-1", "m@+1", "m@1.0", "m@ 1", "m@1 ", "m@1@2", "m@\u0661", "@1"]
    )
    def test_malformed_references_are_refused(self, text: str) -> None:
        with pytest.raises(InvalidNameError):
            split_ref(text)

    def test_parse_wants_a_version(self) -> None:
        with pytest.raises(InvalidNameError, match="expected 'name@version'; found 'digits'"):
            ModelRef.parse("digits")

    @pytest.mark.parametrize("model", [None, 3, b"m@1", ("m", 1)])
    def test_what_is_neither_reference_nor_string_is_refused_by_type(self, model: object) -> None:
        with pytest.raises(InvalidNameError, match=f"found {type(model).__name__}"):
            split_ref(model)  # type: ignore[arg-type]


class TestErrors:
    @pytest.mark.parametrize(("name", "builtin"), BUILTINS.items())
    def test_an_error_is_caught_as_its_builtin(self, name: str, builtin: type[Exception]) -> None:
        error = getattr(errors, name)
        with pytest.raises(builtin, match="where: expected this; found that") as caught:
            raise error("where: expected this; found that")
        assert isinstance(caught.value, TensorVineError)

    @pytest.mark.parametrize("error", ERRORS)
    def test_a_message_is_shown_plainly_and_travels(self, error: type[TensorVineError]) -> None:
        raised = error("m@1: expected a; found b")
        assert str(raised) == "m@1: expected a; found b"
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer)
        pickler.dispatch_table = {}  # without what other packages, such as tblib, registered for all exceptions
        pickler.dump(raised)
        assert str(pickle.loads(buffer.getvalue())) == str(raised)  # noqa: S301 - written one line above

    @pytest.mark.parametrize("error", ERRORS)
    def test_every_error_has_one_builtin_and_stands_in_the_drawing(self, error: type[TensorVineError]) -> None:
        drawing = errors.__doc__ or ""
        if TensorVineError not in error.__bases__:  # it is a kind of another one, and caught as that one's builtin
            (kind,) = error.__bases__
            assert kind in ERRORS
            assert drawing.index(f"── {kind.__name__}(") < drawing.index(f"── {error.__name__} ")
            return
        (builtin,) = set(error.__bases__) - {TensorVineError}
        assert getattr(builtins, builtin.__name__) is builtin
        assert f"── {error.__name__}({builtin.__name__})" in drawing
