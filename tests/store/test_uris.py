"""What messages show of URIs that hold secrets."""

from __future__ import annotations

import re
import string
import traceback
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.store.archive.archive import Archive
from tensorvine.store.archive.opening import open_directory
from tensorvine.store.errors import StorageError
from tensorvine.store.uris import check_credentials, without_credentials

HARD = "/@:?#%&=+ "
"""What a secret may hold that means something in a URI."""
SECRETS = st.lists(st.text("QJXVZ", min_size=3, max_size=5), min_size=1, max_size=4).flatmap(
    lambda parts: st.lists(st.sampled_from(HARD), min_size=len(parts), max_size=len(parts)).map(
        lambda marks: "".join(part + mark for part, mark in zip(parts, marks, strict=True))
    )
)
"""Secrets in parts of letters that nothing else has here."""


def leaked(text: str) -> str | None:
    """Return what of a secret is in a text."""
    found = re.search("[QJXVZ]{3,}", text)
    return found[0] if found else None


class TestShown:
    @pytest.mark.parametrize(
        ("uri", "shown"),
        [
            ("s3://bucket/prefix", "s3://bucket/prefix"),
            ("s3://key:secret@bucket/prefix?region=us-east-1", "s3://bucket/prefix"),
            ("s3://key:se/cret@bucket/prefix", "s3://bucket/prefix"),
            ("s3://key:se@cr/et@bucket/prefix", "s3://bucket/prefix"),
            ("s3://key:se%2Fcr%40et%3A@bucket/prefix", "s3://bucket/prefix"),
            ("s3://key:12/cret@bucket/prefix", "s3://bucket/prefix"),
            ("s3://key:se?cr@et@bucket/prefix", "s3://..."),
            ("s3://key:se#cret@bucket/prefix", "s3://..."),
            ("s3://key:secret", "s3://..."),
            ("s3://key:secret/bucket", "s3://..."),
            ("s3://bucket/prefix?access_key=key&secret_key=se/cret&session_token=to@ken", "s3://bucket/prefix"),
            ("s3://bucket/prefix#secret", "s3://bucket/prefix"),
            ("s3://bucket/team@site/models", "s3://bucket/team@site/models"),
            ("gs://anonymous@bucket/prefix", "gs://bucket/prefix"),
            ("hdfs://user@host:8020/a", "hdfs://host:8020/a"),
            ("abfs://:pass/word@account.dfs.core.windows.net/a", "abfs://account.dfs.core.windows.net/a"),
            ("file:///home/a@b/c?d", "file:///home/a@b/c"),
            ("/home/user@site/models?", "/home/user@site/models?"),
            ("relative:path", "relative:path"),
            ("fsspec+simplecache::http://user:secret@host/a", "fsspec+simplecache::http://..."),
            ("fsspec+zip://a.arrow::http://user:secret@host/a.zip?token=secret", "fsspec+zip://..."),
            ("simplecache::http://user:secret@host/a", "simplecache::http://..."),
            ("odd_scheme://user:secret@host/a", "..."),
            ("s3://bucket/a::b", "s3://bucket/a::b"),
        ],
    )
    def test_a_place_without_user_secret_and_options(self, uri: str, shown: str) -> None:
        assert without_credentials(uri) == shown

    @given(
        st.sampled_from(["s3", "gs", "abfs", "hdfs", "other"]),
        SECRETS,
        st.booleans(),
        st.sampled_from(["", "/", "/prefix", "/a@b", "/a:b"]),
        st.sampled_from(["", "?region=us-east-1", "?endpoint_override=http://u@h:1"]),
    )
    def test_no_part_of_any_secret_is_shown(
        self, scheme: str, secret: str, encoded: bool, folder: str, options: str
    ) -> None:
        secret = quote(secret, safe="") if encoded else secret
        for uri in (f"{scheme}://key:{secret}@bucket{folder}{options}", f"{scheme}://bucket?secret_key={secret}"):
            assert leaked(without_credentials(uri)) is None, without_credentials(uri)


class TestRefused:
    @given(SECRETS, st.sampled_from(["", "/prefix", "/a@b"]))
    def test_opening_one_that_is_not_percent_encoded_says_so_and_shows_nothing(self, secret: str, folder: str) -> None:
        uri = f"s3://key:{secret}@bucket{folder}?region=us-east-1"
        if not set(secret) & set("/@?#") and "@" not in folder:
            return check_credentials(uri)
        with pytest.raises(StorageError, match="'/' as '%2F'") as caught:
            open_directory(uri)
        assert leaked("".join(traceback.format_exception(caught.value))) is None
        return None

    @pytest.mark.parametrize("secret", ["QJXV ZQJX", "QJXV%ZQJX", "QJXV[ZQJX", "QJXV\nZQJX", "QJXVé/ZQJX"])
    @pytest.mark.parametrize("scheme", ["s3", "gs", "abfs", "hdfs", "unknown"])
    def test_what_pyarrow_cannot_read_is_not_in_the_traceback(self, scheme: str, secret: str) -> None:
        with pytest.raises(StorageError) as caught:
            Archive(f"{scheme}://key:{secret}@bu cket/prefix")
        assert leaked("".join(traceback.format_exception(caught.value))) is None
        assert f"{scheme}://" in str(caught.value)

    @pytest.mark.parametrize(
        "uri",
        [
            "s3://bucket/team@site?region=us-east-1",
            "s3://key:se%2Fcret%40@bucket/prefix?endpoint_override=http://localhost:9000&scheme=http",
            "gs://anonymous@bucket/prefix",
            "hdfs://host:8020/a@b",
            "/home/a:b/c@d",
            "file:///a:b/c@d",
        ],
    )
    def test_what_is_clear_is_not_refused(self, uri: str) -> None:
        check_credentials(uri)


def test_letters_of_secrets_are_nowhere_else() -> None:
    assert leaked(string.ascii_lowercase + HARD + "StorageError") is None
