"""URLs of object stores: which there are, and what one must not hold.

Needs no package: `validate` asks before anything is imported, and without a network.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple


class ObjectStore(NamedTuple):
    """A kind of store that fsspec reads and writes.

    Attributes:
        module: what fsspec imports for it; "" where fsspec alone is enough.
    """

    title: str
    module: str = ""


_S3 = ObjectStore("Amazon S3, and stores that speak its protocol", "s3fs")
_GOOGLE = ObjectStore("Google Cloud Storage", "gcsfs")
_AZURE = ObjectStore("Azure Blob Storage", "adlfs")
STORES: Mapping[str, ObjectStore] = {
    "s3": _S3,
    "s3a": _S3,
    "gs": _GOOGLE,
    "gcs": _GOOGLE,
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "oss": ObjectStore("Alibaba Cloud OSS", "ossfs"),
    "file": ObjectStore("a mounted file system"),
    "memory": ObjectStore("the memory of one process, for tests"),
}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_PASSWORD = re.compile(r"//[^/@\s]*:[^/@\s]*@")


def is_url(text: object) -> bool:
    """Return whether a value is a URL, of whatever scheme, and no path."""
    return isinstance(text, str) and _URL.fullmatch(text) is not None


def store_of(url: str) -> ObjectStore:
    """Return the kind of store that a URL without a problem belongs to."""
    return STORES[scheme_of(url)]


def scheme_of(url: str) -> str:
    """Return the part of a URL before `://`, in small letters."""
    return url.partition("://")[0].lower()


def url_problem(url: str) -> str:
    """Return why a URL cannot be used, without the secrets that it may hold; "" if it can be. No store is asked."""
    scheme, place = scheme_of(url), url.partition("://")[2]
    if scheme not in STORES:
        known = ", ".join(f"{name}://" for name in STORES if name != "memory")
        return f"is a URL of a scheme that is not read here; known are {known}. Download it first, and name the file"
    if _PASSWORD.search(url):
        return "contains a password, which would get into logs; leave it to the store's own variables or its login"
    if "?" in place or "#" in place:
        return "contains ? or #; write the plain URL of the object, and leave what signs it to the store's own login"
    if "::" in place or not place.isprintable():
        return "contains :: or a character that cannot be printed"
    parts = place.strip("/").split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "names no object: write scheme://bucket/path, without // and .. in the path"
    if scheme == "file" and not place.startswith("/"):
        return "names a host; write file:///path"
    return ""


def joined(url: str, name: str) -> str:
    """Return the URL of a name below a folder."""
    return f"{url.rstrip('/')}/{name}" if name else url.rstrip("/")
