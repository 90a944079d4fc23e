"""A web server on loopback that serves a folder as object stores do, by ranges, and can be made to fail."""

import threading
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# Called with the path and the bytes to send: returns those to send instead, a status to answer, or None to send half of
# them and cut the connection.
Trouble = Callable[[str, bytes], bytes | HTTPStatus | None]


class Store:
    """Used as a context; `url` is that of the folder.

    Attributes:
        trouble: what goes wrong; may be set at any time.
        sent: bytes of the bodies sent, by path.
        requests: answered or not, by path.
        logins: what the header Authorization said, of each request that had one.

    Args:
        unlisted: answered where the list of a folder is asked for, instead of it.
    """

    def __init__(self, folder: Path, *, ranges: bool = True, unlisted: HTTPStatus | None = None) -> None:
        self.trouble: Trouble = lambda path, data: data
        self.sent, self.requests, self.logins = Counter[str](), Counter[str](), Counter[str]()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, folder, ranges, unlisted))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(store: Store, folder: Path, ranges: bool, unlisted: HTTPStatus | None) -> type[SimpleHTTPRequestHandler]:
    class Handler(SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or each body waits for the other side to confirm the headers

        def __init__(self, *given: Any) -> None:
            super().__init__(*given, directory=str(folder))

        def do_HEAD(self) -> None:
            self.answer(head=True)

        def do_GET(self) -> None:
            self.answer(head=False)

        def answer(self, head: bool) -> None:
            place = Path(self.translate_path(self.path))
            if place.is_dir():
                if unlisted or head:
                    self.send_error(unlisted or HTTPStatus.NOT_FOUND)
                elif (page := self.list_directory(place)) is not None:
                    self.wfile.write(page.read())
                return
            if not place.is_file():
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            store.requests[self.path] += 1
            if "Authorization" in self.headers:
                store.logins[self.headers["Authorization"]] += 1
            data, status, size = place.read_bytes(), HTTPStatus.OK, place.stat().st_size
            asked = self.headers.get("Range", "")
            if ranges and asked.startswith("bytes="):
                start, _, stop = asked.removeprefix("bytes=").partition("-")
                if int(start) >= size:
                    self.send_error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                    return
                data, status = data[int(start) : int(stop) + 1], HTTPStatus.PARTIAL_CONTENT
            found = store.trouble(self.path, data)
            if isinstance(found, HTTPStatus):
                self.send_error(found)
                return
            self.send_response(status)
            self.send_header("Content-Length", str(size if head else len(data)))
            if status is HTTPStatus.PARTIAL_CONTENT:
                self.send_header("Content-Range", f"bytes {start}-{int(start) + len(data) - 1}/{size}")
            self.end_headers()
            if head:
                return
            body = data[: len(data) // 2] if found is None else found
            store.sent[self.path] += len(body)
            self.wfile.write(body)
            if found is None:
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)

        def log_message(self, *given: Any) -> None:
            pass

    return Handler
