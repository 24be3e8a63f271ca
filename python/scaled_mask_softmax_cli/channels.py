"""Reads an index: a folder, a file: or an http(s): address that holds index.json, the channels below whl/, and plain/
with what fits every torch.

An index is trusted to name files and their hashes, and with nothing else. What it says is checked before it is used,
wherever a name could become a path, an address or a line on the terminal:

- a file is a wheel or a source distribution of this project by its whole name, and lies in the channel that its version
  names;
- a link leads to that name: relative within the index, or absolute over https, or http on the index's own host;
- a redirect is followed to https, or within the same host; never from https to http, nor to another kind of address;
- a password in the index's address goes to its host alone.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import html
import http.client
import json
import os
import re
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit, urlunsplit
from urllib.request import url2pathname

from .remedy import redacted
from .status import INDEX, UNTRUSTED, Failure

PROJECT = "scaled-mask-softmax"
DATA = "index.json"
# Far above what an index of ours can be.
_MAX_INDEX, _MAX_WHEEL = 64 << 20, 1 << 30
_CHUNK = 1 << 16
# What a server answers that may do better in a while, how often it is asked, and the longest wait that it may ask for.
BUSY = (408, 429, 500, 502, 503, 504)
_ATTEMPTS, PATIENCE = 3, 60.0
# What a login and a place need; http.client refuses it too, and shows the whole.
_UNFIT = re.compile(r"[\x00-\x20\x7f]")

# Of index.json; the formats before this one are read too.
FORMAT = 1
# The channel of the plain wheel and the source distribution.
PLAIN = "plain"
_CHANNEL = re.compile(rf"whl/(cpu|cu\d{{3}})/torch([0-9a-z.]+)|{PLAIN}")
_WHEEL = re.compile(
    r"scaled_mask_softmax-(?P<version>\d[0-9a-z.]*\+(?P<cuda>cpu|cu\d{3})torch(?P<torch>[0-9a-z.]+))"
    r"-(?P<python>[a-z]+\d+t?)-(?P<abi>\w+)-(?P<platform>[\w.]+)\.whl"
)
_PLAIN = re.compile(
    r"scaled_mask_softmax-(?P<version>\d[0-9a-z.]*)"
    r"(?:-(?P<python>py3)-(?P<abi>none)-(?P<platform>any)\.whl|(?P<source>\.tar\.gz))"
)


@dataclass(frozen=True)
class Wheel:
    """A wheel of an index, or a source distribution, after the checks."""

    channel: str  # "whl/cu130/torch2.14"
    filename: str
    version: str  # "1.0.0+cu130torch2.14"
    address: str
    sha256: str
    size: int
    requires_python: str
    architectures: list[str]
    ptx: list[str]
    yanked: str | None  # why it was withdrawn
    python: str  # tags: "cp311"; empty for a source distribution
    abi: str
    platform: str  # "manylinux_2_28_x86_64"

    @property
    def is_source(self) -> bool:
        return not self.python

    def serves(self, python: str, machine: str, glibc: tuple[int, int] | None = None) -> bool:
        """Whether a Python ("cp311") of a machine, and of a C library where that is known, takes it."""
        if self.python not in (python, "py3") or self.abi not in (python, "none"):
            return False
        if self.platform == "any":
            return True
        found = re.fullmatch(rf"(?:.*\.)?(?:manylinux_(\d+)_(\d+)|linux)_{machine}", self.platform)
        if found is None:
            return False
        return found[1] is None or glibc is None or (int(found[1]), int(found[2])) <= glibc


def clean(text: object, limit: int = 200) -> str:
    """Text from an index as it may be shown: one line, without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))[:limit]


def version_order(version: str) -> tuple[list[int], bool, str]:
    """Sorts versions of this project: "1.0.0rc1+..." before "1.0.0+..."."""
    match = re.match(r"([\d.]*\d)([a-z0-9.]*)", version.partition("+")[0])
    if match is None:
        return [], False, version
    return [int(number) for number in match[1].split(".") if number], not match[2], match[2]


def _host(address: str) -> tuple[str, str]:
    try:
        parts = urlsplit(address)
    except ValueError:
        return "", ""
    return parts.scheme, parts.netloc.rpartition("@")[2].lower()


def may_lead(origin: str, target: str) -> bool:
    """Whether a link or a redirect of `origin` to `target` is followed."""
    scheme, host = _host(target)
    if scheme == "https":
        return True
    return scheme == "http" and (scheme, host) == _host(origin)


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if not may_lead(req.full_url, newurl):
            raise Failure(
                UNTRUSTED,
                f"{redacted(req.full_url)} leads to {clean(redacted(newurl))}, which is not followed: a redirect may "
                "lead to https, or within the same host",
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def trouble(address: str, error: Exception) -> Failure:
    """What went wrong between here and a server, and what to look at."""
    shown, reason = redacted(address), getattr(error, "reason", None) or error
    proxies = [
        name for name in ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy") if name in os.environ
    ]
    hint = f" ({proxies[0]} is set: look at that proxy too)" if proxies else ""
    if isinstance(error, urllib.error.HTTPError):
        said = str(error.reason).partition("\n")[0]
        if error.code in (401, 403):
            variable = "SCALED_MASK_SOFTMAX_INDEX"
            hint = (
                f": give the login as https://NAME:PASSWORD@HOST/..., which {variable} keeps off the command line{hint}"
            )
        elif "infinite loop" in said:
            return Failure(INDEX, f"{shown} redirects in a circle{hint}")
        elif (wait := asked_wait(error)) is not None:
            hint = f" and asks to come back in {wait:.0f} s{hint}"
        return Failure(INDEX, f"{shown} answers {error.code} {clean(said)}{hint}")
    if isinstance(reason, ssl.SSLError):
        hint = f"; where a proxy or a mirror has its own certificate, set SSL_CERT_FILE to it{hint}"
    return Failure(INDEX, f"{shown} cannot be reached: {clean(reason) or type(error).__name__}{hint}")


def asked_wait(error: Exception) -> float | None:
    """The seconds that a server asks to be left alone; None where it does not ask."""
    text = error.headers.get("Retry-After", "") if isinstance(error, urllib.error.HTTPError) else ""
    if re.fullmatch(r"\d{1,9}", text.strip()):
        return float(text)
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    return None


def open_address(address: str, headers: Mapping[str, str], timeout: float, login: str = "") -> http.client.HTTPResponse:
    """An answer of a server. Raises what urllib does, and Failure for a redirect that is not followed."""
    request = urllib.request.Request(address, headers={"User-Agent": PROJECT, "Accept-Encoding": "identity", **headers})
    if login:
        # Not sent along with a redirect.
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    opener = urllib.request.build_opener(_Redirects)
    try:
        answer = opener.open(request, timeout=timeout)
    except ValueError as error:
        raise Failure(
            UNTRUSTED, f"{redacted(address)} leads to what is no address ({clean(error)}), which is not followed"
        ) from None
    assert isinstance(answer, http.client.HTTPResponse)
    if (encoding := answer.headers.get("Content-Encoding", "identity").lower()) != "identity":
        answer.close()
        raise Failure(
            INDEX,
            f"{redacted(address)} comes in the encoding {clean(encoding, 20)}, which was not asked for: have the "
            "server or the proxy send files as they are",
        )
    return answer


def _parse(given: str) -> SplitResult:
    """The parts of an address. Raises Failure for what is none, without showing what may be a password."""
    scheme = given.partition(":")[0].lower()
    try:
        parts = urlsplit(given)
        whole = parts.scheme == "file" or (bool(parts.hostname) and parts.port != 0)
    except ValueError:
        whole = False
    if not whole or (parts.scheme != "file" and _UNFIT.search(given)):
        raise Failure(
            INDEX,
            f"what is given as {scheme}:... is no address: {scheme}://HOST/PATH, in which a name and a password before "
            "the host have / ? # @ : and spaces as %2F %3F %23 %40 %3A %20",
        )
    if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
        raise Failure(INDEX, f"{clean(redacted(given))} names a host, and a file: address has none: file:///PATH")
    return parts


def _folder(given: str) -> Path:
    """The folder of an index. Raises Failure where it is none."""
    try:
        folder = Path(given).expanduser().resolve()
        if os.path.isdir(folder):
            return folder
        os.stat(folder)
        why = "is no folder"
    except FileNotFoundError:
        why = "is no folder"
    except (OSError, RuntimeError, ValueError) as error:
        why = f"is no folder ({clean(getattr(error, 'strerror', None) or error)})"
    raise Failure(INDEX, f"{clean(given)} {why}: give the one that holds {DATA} and whl/, or an address")


class Source:
    """Where an index is."""

    def __init__(self, given: str, timeout: float = 30.0) -> None:
        """`given` is an address or a folder. Raises Failure where it is neither."""
        self.timeout, self.login = timeout, ""
        given = given.removesuffix(f"/{DATA}")
        if re.match(r"(https?|file):", given, re.I):
            parts = _parse(given.rstrip("/"))
            self.address = urlunsplit(parts)
            if "@" in parts.netloc and parts.scheme != "file":
                login, _, host = parts.netloc.rpartition("@")
                self.login = unquote(login)
                self.address = urlunsplit(parts._replace(netloc=host))
        elif re.match(r"[a-z][a-z0-9+.-]+:", given, re.I):
            scheme = clean(given.partition(":")[0])
            raise Failure(INDEX, f"{scheme}: is no address of an index: give a folder, or an address of https or file")
        else:
            self.address = _folder(given).as_uri()
        # What pip is given.
        self.with_login = given.rstrip("/") if self.login else self.address

    @property
    def folder(self) -> Path | None:
        """The folder behind a file: address."""
        parts = urlsplit(self.address)
        return Path(url2pathname(parts.path)) if parts.scheme == "file" else None

    @property
    def shown(self) -> str:
        return str(self.folder) if self.folder is not None else self.address

    def login_for(self, address: str) -> str:
        return self.login if _host(address) == _host(self.address) else ""

    def read_data(self) -> bytes | None:
        """index.json; None where there is none."""
        if self.folder is not None:
            if not os.path.isdir(self.folder):
                raise Failure(INDEX, f"{self.shown} is no folder: give the one that holds {DATA} and whl/")
            try:
                return (self.folder / DATA).read_bytes()
            except FileNotFoundError:
                return None
            except OSError as error:
                raise Failure(INDEX, f"{self.folder / DATA} cannot be read: {error.strerror}") from None
        address = f"{self.address}/{DATA}"
        for left in range(_ATTEMPTS - 1, -1, -1):
            try:
                with open_address(address, {"Cache-Control": "no-cache"}, self.timeout, self.login) as answer:
                    return self._receive(address, answer)
            except urllib.error.HTTPError as error:
                if error.code in (404, 410):
                    return None
                wait = asked_wait(error)
                wait = 0.5 * (_ATTEMPTS - left) if wait is None else wait
                if error.code not in BUSY or left == 0 or wait > PATIENCE:
                    raise trouble(address, error) from None
                print(f"{address} answers {error.code}; asking again in {wait:.1f} s", file=sys.stderr, flush=True)
                time.sleep(wait)
            except (OSError, http.client.HTTPException) as error:
                raise trouble(address, error) from None
        raise AssertionError("the last attempt returns or raises")

    def _receive(self, address: str, answer: http.client.HTTPResponse) -> bytes:
        """The whole of an answer, within ten times the timeout, which each wait for a piece of it has."""
        data, end = bytearray(), time.monotonic() + 10 * self.timeout
        expected = answer.length
        while chunk := answer.read1(_CHUNK):
            data += chunk
            if len(data) > _MAX_INDEX:
                raise Failure(UNTRUSTED, f"{address} is larger than any index of this project")
            if time.monotonic() > end:
                raise Failure(
                    INDEX,
                    f"{address} is too slow: {len(data)} bytes in {10 * self.timeout:g} s; a larger --timeout waits "
                    "longer",
                )
        if expected is not None and len(data) < expected:
            raise Failure(INDEX, f"{address} ended after {len(data)} of {expected} bytes; repeat the command")
        return bytes(data)

    def link(self, channel: str, filename: str, url: str) -> str:
        """The address that an entry of a channel links to. Raises Failure for one that is not followed."""
        base = f"{self.address}/{channel}/{PROJECT}/"
        address = urljoin(base, url)
        if unquote(urlsplit(address).path).rpartition("/")[2] != filename:
            raise Failure(UNTRUSTED, f"{self.shown}: the link of {filename} leads to {clean(address)}")
        if self.folder is not None and urlsplit(address).scheme == "file":
            path = Path(url2pathname(urlsplit(address).path))
            if not path.resolve().is_relative_to(self.folder.resolve()):
                raise Failure(
                    UNTRUSTED, f"{self.shown}: the link of {filename} leads out of the folder, to {clean(path)}"
                )
            return address
        if not may_lead(self.address, address):
            raise Failure(
                UNTRUSTED, f"{self.shown}: the link of {filename} leads to {clean(address)}, which is not followed"
            )
        return address


def _wheel(source: Source, channel: str, entry: Mapping[str, Any]) -> Wheel:
    filename = entry["filename"]
    match = (_WHEEL.fullmatch(filename) or _PLAIN.fullmatch(filename)) if isinstance(filename, str) else None
    if match is None:
        raise Failure(UNTRUSTED, f"{source.shown}: {clean(filename)!r} is no name of a wheel of this project")
    own = f"whl/{match['cuda']}/torch{match['torch']}" if match.re is _WHEEL else PLAIN
    if own != channel or entry["version"] != match["version"]:
        raise Failure(UNTRUSTED, f"{source.shown}: {filename} is listed in {clean(channel)}, which is not its channel")
    sha256, size, yanked = entry["sha256"], entry["size"], entry.get("yanked")
    if not isinstance(sha256, str) or not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise Failure(UNTRUSTED, f"{source.shown}: {filename} has no sha256")
    if type(size) is not int or not 0 < size <= _MAX_WHEEL:
        raise Failure(UNTRUSTED, f"{source.shown}: {filename} cannot have {clean(size)} bytes")
    return Wheel(
        channel=channel,
        filename=filename,
        version=match["version"],
        address=source.link(channel, filename, str(entry["url"])),
        sha256=sha256,
        size=size,
        requires_python=clean(entry.get("requires_python", "")),
        architectures=[clean(arch) for arch in entry.get("architectures", [])],
        ptx=[clean(arch) for arch in entry.get("ptx", [])],
        yanked=None if yanked is None else clean(yanked),
        python=match["python"] or "",
        abi=match["abi"] or "",
        platform=match["platform"] or "",
    )


def parse(source: Source, data: bytes) -> dict[str, list[Wheel]]:
    """The wheels by channel. Raises Failure where index.json is none, or says what no index of ours does."""
    where = f"{source.shown}/{DATA}"
    try:
        everything = json.loads(data)
        version, channels = everything.get("format", FORMAT), everything["channels"]
        if type(version) is not int or version > FORMAT:
            raise Failure(
                INDEX,
                f"{where} is of format {clean(version, 20)}, and this command reads format {FORMAT}: install a newer "
                f"{PROJECT}, or the wheel with the lines of the index's page",
            )
        rows = [(name, entry) for name, entries in channels.items() for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        begins = clean(data[:40].decode("utf-8", "replace"), 40)
        raise Failure(
            INDEX, f"{where} is no index of this project (it begins {begins!r}): give the address above whl/"
        ) from None
    found: dict[str, list[Wheel]] = {}
    for name in channels:
        if not _CHANNEL.fullmatch(name):
            raise Failure(UNTRUSTED, f"{where}: {clean(name)!r} is no name of a channel")
        found[name] = []
    for name, entry in rows:
        try:
            found[name].append(_wheel(source, name, entry))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Failure(UNTRUSTED, f"{where}: an entry of {name} lacks what every entry has") from None
        if len({wheel.filename for wheel in found[name]}) < len(found[name]):
            raise Failure(UNTRUSTED, f"{where} lists {found[name][-1].filename} twice")
    return found


def read(source: Source) -> dict[str, list[Wheel]] | None:
    """The wheels by channel; None where there is no index.json, as on a mirror that has the pages alone."""
    data = source.read_data()
    return None if data is None else parse(source, data)


def page(title: str, links: list[str]) -> str:
    """A page of a simple index (PEP 503)."""
    return (
        f'<!DOCTYPE html>\n<html>\n  <head><meta charset="utf-8"><title>{title}</title></head>\n  <body>\n'
        + "".join(f"    {link}<br>\n" for link in links)
        + "  </body>\n</html>\n"
    )


def link(entry: Mapping[str, Any]) -> str:
    """The link of a file beside the page, for an entry of index.json."""
    attributes = {"data-core-metadata": f"sha256={entry['metadata_sha256']}"}
    if entry["requires_python"]:
        attributes["data-requires-python"] = entry["requires_python"]
    if entry["yanked"] is not None:
        attributes["data-yanked"] = entry["yanked"]
    text = " ".join(f'{name}="{html.escape(value)}"' for name, value in attributes.items())
    return f'<a href="{quote(entry["filename"])}#sha256={entry["sha256"]}" {text}>{entry["filename"]}</a>'
