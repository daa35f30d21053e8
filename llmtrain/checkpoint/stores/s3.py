"""An S3-compatible object store, through boto3. Endpoint and credentials are StreamingDataset's: S3_ENDPOINT_URL, AWS_*,
S3_CANNED_ACL.

boto3's own upload_file begins a large file anew after every interruption, so parts are sent here: the parts
that the store has of a file are compared with the file, and only the others are sent.
"""

import base64
import hashlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

import xxhash
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    ResponseStreamingError,
)
from urllib3.exceptions import HTTPError as Urllib3Error

from llmtrain.checkpoint.format.manifest import CheckpointError
from llmtrain.checkpoint.stores.base import StoreError
from llmtrain.logs import log

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """Number of attempts, the longest of the pauses between them, and the seconds after which no attempt begins.

    The n-th pause is drawn evenly from [0, min(longest, first * 2^n)] ("full jitter", M. Brooker, Exponential Backoff And
    Jitter, AWS Architecture Blog, 2015), so that the nodes of a run do not all come back at once. At most 52 s in all.
    """

    attempts: int = 8
    first: float = 0.5
    longest: float = 20.0
    patience: float = 120.0

    def pauses(self) -> Iterator[float]:
        """A pause before every attempt but the first."""
        for n in range(self.attempts - 1):
            yield random.uniform(0, min(self.longest, self.first * 2**n))

    def call(self, action: Callable[[], T], transient: Callable[[Exception], bool]) -> T:
        """Return action(); called again while its exceptions are `transient`. Raises its last exception, or one that is not."""
        until = time.monotonic() + self.patience
        for pause in self.pauses():
            try:
                return action()
            except Exception as error:
                if not transient(error) or time.monotonic() > until:
                    raise
            time.sleep(pause)
        return action()


PART_BYTES = 16 * 2**20
"""Size of a part of a multipart upload: a lost connection costs as much, and a sending thread holds it in memory."""
_MOST_PAGES = 2_000
"""Pages of a listing, of 1,000 objects each."""
_MAX_PARTS = 10_000
"""S3's limit (https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html)."""
_READ_BYTES = 2**20
_CONNECT_SECONDS, _READ_SECONDS = 10, 60
_SILENT_SECONDS, _REPORT_SECONDS = 5.0, 30.0
"""Seconds without an answer after which that is logged, and logged again."""
CONNECTIONS = 8
"""Files that are sent or received at a time."""
_DIGEST = "xxh3-128"
"""The key of a file's hash in the object's metadata."""
_TRANSIENT_CODES = {"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "BadDigest", "IncompleteBody"}
_ABSENT_CODES = {"404", "NoSuchKey", "NotFound"}


class S3Store:
    """Objects of a bucket under a prefix; see ObjectStore."""

    def __init__(self, bucket: str, prefix: str, retry: RetryPolicy | None = None, part_bytes: int = PART_BYTES):
        self.url = f"s3://{bucket}/{prefix}"
        self._bucket, self._prefix = bucket, prefix + "/"
        self._retry = retry or RetryPolicy()
        self._part_bytes = part_bytes
        self._client = _client()

    def sizes(self, prefix: str = "") -> dict[str, int]:
        pages = self._pages(
            "list_objects_v2", "", {"ContinuationToken": "NextContinuationToken"}, Prefix=self._prefix + prefix
        )
        return {
            item["Key"].removeprefix(self._prefix): item["Size"] for page in pages for item in page.get("Contents", [])
        }

    def read(self, name: str) -> bytes:
        def get() -> bytes:
            answer = self._client.get_object(Bucket=self._bucket, **self._key(name))
            content = answer["Body"].read()
            expected = answer["Metadata"].get(_DIGEST)
            if expected and xxhash.xxh3_128_hexdigest(content) != expected:
                raise CheckpointError(f"{self.url}/{name} is damaged: it is not what was uploaded")
            return content

        return self._try(get, name)

    def holds(self, name: str, size: int, digest: str) -> bool:
        try:
            found = self._request("head_object", name, **self._key(name))
        except FileNotFoundError:
            return False
        return found["ContentLength"] == size and found["Metadata"].get(_DIGEST) == digest

    def put(self, name: str, file: BinaryIO, size: int, digest: str, sent: Callable[[int], None]) -> None:
        for _ in range(2):
            if size > self._part_bytes:
                self._put_parts(name, file, size, digest, sent)
            else:
                content = os.pread(file.fileno(), size + 1, 0)
                self._refuse_damage(file, xxhash.xxh3_128_hexdigest(content), digest)
                self._request("put_object", name, **self._key(name), **_body(content), **_created(digest))
                sent(len(content))
            if self.holds(name, size, digest):
                return
            # What an earlier attempt had begun may have been another file of this name, and bears that file's hash.
            self.delete(name)
            self.abandon(name)
        raise StoreError(f"{self.url}/{name} did not arrive as it was sent")

    def _put_parts(self, name: str, file: BinaryIO, size: int, digest: str, sent: Callable[[int], None]) -> None:
        part_bytes = max(self._part_bytes, -(-size // _MAX_PARTS))
        upload, there = self._open_upload(name, digest)
        hasher = xxhash.xxh3_128()
        parts = []
        for number, start in enumerate(range(0, size, part_bytes), 1):
            content = os.pread(file.fileno(), min(part_bytes, size - start), start)
            hasher.update(content)
            # The store's tag of a part is its MD5, except under SSE-KMS, where every part is then sent again.
            tag = f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
            if there.get(number) != (len(content), tag):
                where = {**self._key(name), "UploadId": upload, "PartNumber": number}
                tag = self._request("upload_part", name, **where, **_body(content))["ETag"]
                sent(len(content))
            parts.append({"PartNumber": number, "ETag": tag})
        if hasher.hexdigest() != digest:
            self._request("abort_multipart_upload", name, **self._key(name), UploadId=upload)
        self._refuse_damage(file, hasher.hexdigest(), digest)
        # A completion that arrived, but whose answer was lost, gives NoSuchUpload the second time: put() compares the object.
        self._request(
            "complete_multipart_upload",
            name,
            harmless="NoSuchUpload",
            **self._key(name),
            UploadId=upload,
            MultipartUpload={"Parts": parts},
        )

    def _open_upload(self, name: str, digest: str) -> tuple[str, dict[int, tuple[int, str]]]:
        """A multipart upload of the object, started earlier or now, and the parts it has: part number -> (bytes, tag)."""
        best: tuple[str, dict[int, tuple[int, str]]] | None = None
        for upload in self._unfinished(self._prefix + name):
            if upload["Key"] != self._prefix + name:
                continue
            parts = self._parts(name, upload["UploadId"])
            if parts and (best is None or len(parts) > len(best[1])):
                best = upload["UploadId"], parts
        if best is not None:
            return best
        begun = self._request("create_multipart_upload", name, **self._key(name), **_created(digest))
        return begun["UploadId"], {}

    def _unfinished(self, prefix: str) -> Iterator[dict[str, Any]]:
        following = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        for page in self._pages("list_multipart_uploads", "", following, Prefix=prefix):
            yield from page.get("Uploads", [])

    def _parts(self, name: str, upload: str) -> dict[int, tuple[int, str]]:
        following = {"PartNumberMarker": "NextPartNumberMarker"}
        pages = self._pages("list_parts", name, following, **self._key(name), UploadId=upload)
        return {part["PartNumber"]: (part["Size"], part["ETag"]) for page in pages for part in page.get("Parts", [])}

    def _pages(
        self, operation: str, name: str, following: Mapping[str, str], **arguments: Any
    ) -> Iterator[dict[str, Any]]:
        """Pages of a listing. following: the fields of a page that ask for the next one, by the arguments they become."""
        more: dict[str, Any] = {}
        for _ in range(_MOST_PAGES):
            page = self._request(operation, name, **arguments, **more)
            if "IsTruncated" not in page:  # which every listing has: an HTML page or an empty answer is none
                raise StoreError(f"{self.url}: what answers there is no S3 store (a listing without IsTruncated)")
            yield page
            if not page.get("IsTruncated"):
                return
            before, more = more, {argument: page.get(field) for argument, field in following.items()}
            if more == before or None in more.values():
                raise StoreError(f"{self.url}: what answers there is no S3 store (a listing that does not go on)")
        raise StoreError(f"{self.url}: a listing of more than {_MOST_PAGES:,} pages; give the run a prefix of its own")

    def stream(self, name: str, size: int) -> Iterator[bytes]:
        at, pauses = 0, self._retry.pauses()
        while at < size:
            opened = self._request("get_object", name, **self._key(name), **({"Range": f"bytes={at}-"} if at else {}))
            before = at
            try:
                for chunk in opened["Body"].iter_chunks(_READ_BYTES):
                    at += len(chunk)
                    yield chunk
                break
            except (BotoCoreError, Urllib3Error, OSError) as error:
                if at > before:  # it goes on, if slowly
                    pauses = self._retry.pauses()
                pause = next(pauses, None)
                if pause is None:
                    raise self._failed(name, error) from error
            time.sleep(pause)
        if at != size:
            raise StoreError(f"{self.url}/{name} is damaged: it has {at:,} bytes, not {size:,}")

    def delete(self, name: str) -> None:
        self._request("delete_object", name, **self._key(name))

    def abandon(self, prefix: str) -> None:
        for upload in list(self._unfinished(self._prefix + prefix)):
            where = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
            self._request("abort_multipart_upload", prefix, harmless="NoSuchUpload", **where)

    def _refuse_damage(self, file: BinaryIO, found: str, digest: str) -> None:
        if found != digest:
            raise CheckpointError(f"{file.name} is damaged on this disk (its hash is not the manifest's): not uploaded")

    def _key(self, name: str) -> dict[str, str]:
        return {"Key": self._prefix + name}

    def _request(self, operation: str, name: str, *, harmless: str = "", **arguments: Any) -> dict[str, Any]:
        """Send one request, again where it may help. harmless: an error code of the store that is no error here."""
        request = getattr(self._client, operation)

        def send() -> dict[str, Any]:
            try:
                with self._reported(name) if "Body" not in arguments else nullcontext():  # sending may take its time
                    return request(Bucket=self._bucket, **arguments)
            except ClientError as error:
                if error.response["Error"]["Code"] == harmless:
                    return {}
                raise

        return self._try(send, name)

    @contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        """Context of a request: while it has no answer, that is logged."""
        answered, began = threading.Event(), time.monotonic()

        def report() -> None:
            pause = _SILENT_SECONDS
            while not answered.wait(pause):
                log.info(f"{self._where(name)} has not answered for {time.monotonic() - began:.0f} s")
                pause = _REPORT_SECONDS

        threading.Thread(target=report, name="store", daemon=True).start()
        try:
            yield
        finally:
            answered.set()

    def _where(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _try(self, action: Callable[[], Any], name: str) -> Any:
        try:
            return self._retry.call(action, _transient)
        except ClientError as error:
            if name and error.response["Error"]["Code"] in _ABSENT_CODES:
                raise FileNotFoundError(f"{self.url}/{name}") from error
            raise self._failed(name, error) from error
        except RecursionError:
            redirects = "it answers with redirects that do not end, so it is no S3 store"
            raise StoreError(f"{self.url}: {redirects}; see S3_ENDPOINT_URL") from None
        except (BotoCoreError, Urllib3Error, OSError) as error:
            raise self._failed(name, error) from error

    def _failed(self, name: str, error: Exception) -> StoreError:
        hint = "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" if isinstance(error, NoCredentialsError) else ""
        tried = " (tried several times)" if _transient(error) else ""
        return StoreError(f"{self._where(name)}: {error}{hint}{tried}")


def _client() -> Any:
    from boto3.session import Session
    from botocore.config import Config

    endpoint = os.environ.get("S3_ENDPOINT_URL")
    if endpoint is not None and not re.match(r"https?://[^/\s]+", endpoint):
        raise StoreError(f"S3_ENDPOINT_URL is {endpoint}; expected http://HOST:PORT or https://HOST")
    return Session().client(
        "s3",
        endpoint_url=endpoint,
        config=Config(
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_READ_SECONDS,
            max_pool_connections=2 * CONNECTIONS,
            retries={"total_max_attempts": 1},  # RetryPolicy does it
            # Bodies carry Content-MD5, which every compatible store checks; the newer checksums some refuse.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


def _body(content: bytes) -> dict[str, Any]:
    checksum = base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
    return {"Body": content, "ContentMD5": checksum}


def _created(digest: str) -> dict[str, Any]:
    acl = os.environ.get("S3_CANNED_ACL")
    return {"Metadata": {_DIGEST: digest}, **({"ACL": acl} if acl else {})}


def _transient(error: Exception) -> bool:
    """True if the same request may succeed in a moment."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or status == 429 or error.response["Error"]["Code"] in _TRANSIENT_CODES
    kinds = (ConnectionError, HTTPClientError, IncompleteReadError, ResponseStreamingError, Urllib3Error, OSError)
    return isinstance(error, kinds)
