"""An S3 server in memory for the lines of the object tier, without checks of signatures; and a plain client of one.

``python -m kvstore.tools.bench.bare_s3`` prints the port that it listens on. It has what the tier uses:
objects, ranges, conditional writes, listings and deletions.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import re
import socket
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

from kvstore.model.chunks import ByteArray
from kvstore.tools.bench.samples import BenchError

ACCESS_KEY, SECRET_KEY = "bench", "benchbenchbench"
REGION: Final = "us-east-1"
_WHEN: Final = "Sun, 22 Nov 2026 10:00:00 GMT"
_RANGE: Final = re.compile(r"bytes=(\d+)-(\d+)")
_DELETED: Final = re.compile(rb"<Key>([^<]+)</Key>")


class MemoryS3:
    """The server. Each connection has a thread."""

    def __init__(self) -> None:
        self._objects: dict[str, bytearray] = {}
        self._spare: dict[int, list[bytearray]] = {}  # by length, used again, because fresh memory is slower
        self._listener = socket.create_server(("127.0.0.1", 0))

    @property
    def port(self) -> int:
        """Port that it listens on."""
        return int(self._listener.getsockname()[1])

    def serve(self) -> None:
        """Answer until the process ends."""
        while True:
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb", buffering=1 << 16) as incoming:
            while line := incoming.readline():
                method, target, _ = line.decode().split()
                headers = http.client.parse_headers(incoming)
                url = urlsplit(target)
                name, size_bytes = unquote(url.path), int(headers.get("Content-Length", 0))
                if method == "PUT":
                    self._put(connection, incoming, name, size_bytes, only_new=headers.get("If-None-Match") == "*")
                elif method == "POST":
                    _say(connection, "200 OK", self._delete(name, incoming.read(size_bytes)))
                elif "list-type" in url.query:
                    _say(connection, "200 OK", self._listing(name, parse_qs(url.query)))
                else:
                    self._get(connection, name, headers.get("Range"))

    def _put(self, connection: socket.socket, incoming: object, name: str, size_bytes: int, *, only_new: bool) -> None:
        spare = self._spare.get(size_bytes)
        kept = spare.pop() if spare else bytearray(size_bytes)
        incoming.readinto(kept)  # type: ignore[attr-defined] # a BufferedReader, which fills all of it
        if only_new and name in self._objects:
            _say(connection, "412 Precondition Failed")
            return
        replaced, self._objects[name] = self._objects.get(name), kept
        if replaced is not None:
            self._spare.setdefault(len(replaced), []).append(replaced)
        _say(connection, "200 OK")

    def _get(self, connection: socket.socket, name: str, wanted: str | None) -> None:
        found = self._objects.get(name)
        if found is None:
            _say(connection, "404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>")
            return
        span = _RANGE.fullmatch(wanted or "")
        begin, end = (int(span[1]), min(int(span[2]) + 1, len(found))) if span else (0, len(found))
        extra = f"Content-Range: bytes {begin}-{end - 1}/{len(found)}\r\n" if span else ""
        _say(connection, "206 Partial Content" if span else "200 OK", memoryview(found)[begin:end], extra)

    def _delete(self, bucket: str, request: bytes) -> bytes:
        keys = _DELETED.findall(request)
        for key in keys:
            freed = self._objects.pop(f"{bucket.rstrip('/')}/{key.decode()}", None)
            if freed is not None:
                self._spare.setdefault(len(freed), []).append(freed)
        return b"<DeleteResult>%b</DeleteResult>" % b"".join(b"<Deleted><Key>%b</Key></Deleted>" % key for key in keys)

    def _listing(self, bucket: str, query: dict[str, list[str]]) -> bytes:
        bucket = bucket.rstrip("/") + "/"
        prefix, after = query.get("prefix", [""])[0], query.get("start-after", [""])[0]
        names = sorted(name.removeprefix(bucket) for name in list(self._objects) if name.startswith(bucket + prefix))
        entries = "".join(
            f"<Contents><Key>{name}</Key><Size>1</Size><LastModified>2026-11-22T10:00:00.000Z</LastModified></Contents>"
            for name in names
            if name > after
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()


def _say(connection: socket.socket, status: str, body: bytes | memoryview = b"", extra: str = "") -> None:
    head = f'HTTP/1.1 {status}\r\nETag: "x"\r\nLast-Modified: {_WHEN}\r\n{extra}Content-Length: {len(body)}\r\n\r\n'
    connection.sendall(head.encode())
    if body:
        connection.sendall(body)


class PlainClient:
    """One connection to an S3 server, with its own signatures: what a path of the object tier is compared with.

    Args:
        port: of the server.
        bucket: for the objects.
        chunks: uint8 ``[num_chunks, chunk_bytes]`` to store.
        keys: access key and secret key.
    """

    def __init__(self, port: int, bucket: str, chunks: ByteArray, keys: tuple[str, str]) -> None:
        self._host = f"127.0.0.1:{port}"
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0, blocksize=1 << 20)
        self._bucket, self._keys = bucket, keys
        self._chunks = chunks
        self._loaded = chunks.copy()

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def store(self) -> None:
        """Store all chunks, one after the other."""
        for number, chunk in enumerate(self._chunks):
            path = self._path(number)
            headers = {**self._signed("PUT", path), "Content-Length": str(len(chunk))}
            self._connection.request("PUT", path, body=chunk.data, headers=headers)
            self._end(self._connection.getresponse())

    def retrieve(self) -> None:
        """Load all chunks into memory that was used before, one after the other."""
        for number, chunk in enumerate(self._loaded):
            path, view, done = self._path(number), chunk.data, 0
            self._connection.request("GET", path, headers=self._signed("GET", path))
            answer = self._connection.getresponse()
            while count := answer.readinto(view[done:]):
                done += count
            self._end(answer)

    def _path(self, number: int) -> str:
        return f"/{self._bucket}/plain/{number}"

    def _end(self, answer: http.client.HTTPResponse) -> None:
        if answer.status != http.client.OK:
            raise BenchError(f"the S3 server answers {answer.status} to a plain client")
        answer.read()

    def _signed(self, method: str, path: str) -> dict[str, str]:
        """Return the headers of a request with a signature of version 4 that leaves out the body."""
        now, content = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"), "UNSIGNED-PAYLOAD"
        names = "host;x-amz-content-sha256;x-amz-date"
        head = f"host:{self._host}\nx-amz-content-sha256:{content}\nx-amz-date:{now}\n"
        request = f"{method}\n{path}\n\n{head}\n{names}\n{content}"
        scope = f"{now[:8]}/{REGION}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        key = _derived(f"AWS4{self._keys[1]}".encode(), (now[:8], REGION, "s3", "aws4_request"))
        signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
        login = f"Credential={self._keys[0]}/{scope}, SignedHeaders={names}, Signature={signature}"
        return {"x-amz-date": now, "x-amz-content-sha256": content, "Authorization": f"AWS4-HMAC-SHA256 {login}"}


def _derived(key: bytes, words: Sequence[str]) -> bytes:
    for word in words:
        key = hmac.new(key, word.encode(), hashlib.sha256).digest()
    return key


if __name__ == "__main__":
    server = MemoryS3()
    print(server.port, flush=True)
    server.serve()
