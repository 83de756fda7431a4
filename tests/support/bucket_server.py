"""A server of S3 on loopback, moto's, whose answers fail as a store's do: slow down, cut, full, a wrong key."""

import contextlib
import io
import logging
import os
import random
import socket
import threading
import urllib.request

KEY = "hlat-test-key"
CALM_KEY = "hlat-calm-key"  # whose requests meet no fault and are not listed


class Faults:
    """What fails, and the requests so far; changed while the server runs.

    Attributes:
      slow_share: of the requests that are answered 503 SlowDown.
      cut_share: of the answers that are cut: a body after its half, others before their first byte.
      limit_bytes: of all bodies that are stored; past them the store is full.
      down: whether every request is answered 503.
      stored_bytes: of the bodies that came with PUT.
    """

    def __init__(self, seed=0):
        self.stored_bytes, self.requests, self._random = 0, [], random.Random(seed)
        self.calm()

    def calm(self, *, slow_share=0.0, cut_share=0.0):
        """Ends all faults but those."""
        self.slow_share, self.cut_share = slow_share, cut_share
        self.limit_bytes, self.down = 1 << 60, False
        self.before = lambda method, path: None  # called before each request

    def drawn(self, share):
        return self._random.random() < share


def _faulty(application, faults):
    """Returns the application with the faults before and after it."""
    lock = threading.Lock()

    def answer(environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if f"Credential={CALM_KEY}/" in environ.get("HTTP_AUTHORIZATION", ""):
            return stored(environ, start_response)
        with lock:
            faults.requests.append(f"{method} {path}")
            slow, cut = faults.down or faults.drawn(faults.slow_share), faults.drawn(faults.cut_share)
            if method == "PUT" and not slow:
                faults.stored_bytes += int(environ.get("CONTENT_LENGTH") or 0)
            full = method in ("PUT", "POST") and faults.stored_bytes > faults.limit_bytes
        faults.before(method, path)
        if f"Credential={KEY}/" not in environ.get("HTTP_AUTHORIZATION", ""):
            return fail(start_response, "403 Forbidden", "InvalidAccessKeyId", "The access key does not exist.")
        if slow:
            return fail(start_response, "503 Slow Down", "SlowDown", "Please reduce your request rate.")
        if full:
            return fail(start_response, "507 Insufficient Storage", "StorageFull", "The store has no free space.")
        [whole] = stored(environ, start_response)
        if cut and method != "GET":  # done, and the client does not learn it
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return [whole[: len(whole) // 2]] if cut else [whole]

    def stored(environ, start_response):
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with lock:  # moto is not made for threads
            started = []
            whole = b"".join(application({**environ, "wsgi.input": io.BytesIO(body)}, lambda *a: started.append(a[:2])))
        start_response(*started[0])
        return [whole]

    def fail(start_response, status, code, message):
        body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        start_response(status, [("Content-Length", str(len(body))), ("Content-Type", "application/xml")])
        return [body]

    return answer


@contextlib.contextmanager
def serve(*, bucket="bucket", seed=0):
    """Yields (faults, environment) of an S3 server that has one empty bucket; os.environ has them in the block."""
    import werkzeug.serving
    from moto.server import create_backend_app

    faults = Faults(seed)
    application = _faulty(create_backend_app("s3"), faults)
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = werkzeug.serving.make_server("127.0.0.1", 0, application, threaded=True)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    given = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": "secret"}
    given |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    before = dict(os.environ)
    try:
        headers = {"Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request"}
        urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="PUT", headers=headers)).close()
        os.environ.update(given)
        yield faults, given
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.shutdown()
        server.server_close()
