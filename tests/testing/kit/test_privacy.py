"""Secrets are found in files that other users may open, whatever compresses them."""

import bz2
import gzip
import lzma
import os
import zipfile
from contextlib import nullcontext

import numpy as np
import pytest

from fd_core.testing.kit.law import InvariantViolated
from fd_core.testing.kit.privacy import contents_of, hidden_from_other_users, hidden_in_any_folder, kept_out_of_logs

TEXT = b"".join(b"%d " % (10**9 + 7919 * number) for number in range(30_000))


def write_archive(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tokens", TEXT)


WRITTEN = {
    "plain": lambda path: path.write_bytes(TEXT),
    "gzip": lambda path: path.write_bytes(gzip.compress(TEXT)),
    "two of gzip": lambda path: path.write_bytes(gzip.compress(TEXT[:999]) + gzip.compress(TEXT[999:])),
    "bzip2": lambda path: path.write_bytes(bz2.compress(TEXT)),
    "xz": lambda path: path.write_bytes(lzma.compress(TEXT)),
    "zip": write_archive,
}


@pytest.mark.parametrize("form", WRITTEN)
def test_secret_in_an_open_file_is_found(tmp_path, form):
    path = tmp_path / "file"
    with pytest.raises(InvariantViolated, match="has the mode 644"), hidden_from_other_users(tmp_path, TEXT[-9:]):
        WRITTEN[form](path)
    assert contents_of(path) == TEXT


@pytest.mark.parametrize("form", WRITTEN)
def test_private_files_and_those_without_the_secret_pass(tmp_path, form):
    with hidden_from_other_users(tmp_path, TEXT[-9:]):
        os.close(os.open(tmp_path / "file", os.O_CREAT, 0o600))
        WRITTEN[form](tmp_path / "file")
    with hidden_from_other_users(tmp_path, b"another"):
        WRITTEN[form](tmp_path / "other")


@pytest.mark.parametrize("changes", [True, False])
def test_folder_that_was_there_protects_files_once_its_mode_is_changed(tmp_path, changes):
    found = []
    with pytest.raises(InvariantViolated, match="has the mode 644") if not changes else nullcontext():
        for hidden in hidden_in_any_folder(tmp_path):
            with hidden:
                (tmp_path / "folder").mkdir(0o700, exist_ok=True)
                if changes:
                    (tmp_path / "folder").chmod(0o700)
                found.append([path.name for path in (tmp_path / "folder").iterdir()])
                (tmp_path / "folder" / "file").write_bytes(TEXT)
    assert found == [[], []]


def test_file_that_is_not_complete_is_read_as_far_as_it_goes(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(TEXT)[:50_000])
    assert TEXT.startswith(contents_of(path))
    assert len(contents_of(path)) > 50_000
    path.write_bytes(b"PK\3\4 and nothing else")
    assert contents_of(path) == b"PK\3\4 and nothing else"


@pytest.mark.parametrize("form", [str, lambda ids: np.array(ids, "<i4"), lambda ids: np.array(ids, "<i8")])
def test_file_with_token_ids_is_found(tmp_path, form):
    ids = (251, 239, 241)
    text = form(ids)
    with pytest.raises(InvariantViolated, match="files hold token ids"), kept_out_of_logs(ids=ids):
        (tmp_path / "steps").write_bytes(b"step " + (text.encode() if isinstance(text, str) else text.tobytes()))
    with kept_out_of_logs(ids=ids):
        (tmp_path / "sizes").write_bytes(b"a step of 251 and 239 tokens")
