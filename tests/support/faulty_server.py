"""A server of one file on loopback, as HTTP and as a bucket of S3, whose answers fail in a given way."""

import contextlib
import http.server
import re
import threading
import urllib.parse

FILE = "/bucket/texts/a.jsonl"
_LISTING = """<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name><Prefix></Prefix>
<KeyCount>1</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated><Contents><Key>texts/a.jsonl</Key>
<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"e"</ETag><Size>{}</Size></Contents></ListBucketResult>"""
_NOTHING = re.sub("<Contents>.*</Contents>", "", _LISTING.replace("<KeyCount>1", "<KeyCount>0"), flags=re.DOTALL)
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


@contextlib.contextmanager
def serve(content, *, fault="", failing=range(10**9), methods=("GET", "HEAD"), ranges=True):
    """Yields (port, requests) of a server of `content` at `FILE`, of which the requests numbered `failing` fail.

    Args:
      fault: "hang": no answer; "slow": 503 SlowDown; "cut": half of the body, then the connection ends.
      methods: those that are numbered and can fail.
      ranges: whether it knows ranges and the size; else it sends all, in chunks.
    """
    requests, ended, lock = [], threading.Event(), threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def answer(self):
            with lock:
                number = sum(request.split()[0] in methods for request in requests)
                fails = bool(fault) and self.command in methods and number in failing
                requests.append(f"{self.command} {self.path} {self.headers['Range']}{' failed' * fails}")
            if fails and fault == "hang":
                ended.wait()
                self.close_connection = True
            elif fails and fault == "slow":
                self.send(503, _SLOW_DOWN)
            elif "list-type" in self.path:
                prefix = urllib.parse.parse_qs(self.path).get("prefix", [""])[0]
                found = FILE.removeprefix("/bucket/").startswith(prefix)
                self.send(200, (_LISTING if found else _NOTHING).format(len(content)).encode())
            elif self.path != FILE:
                self.send(404, b"")
            elif not ranges:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                if self.command == "GET":
                    sent = content[: len(content) // 2] if fails else content
                    self.wfile.write(b"%x\r\n%s\r\n%s" % (len(sent), sent, b"" if fails else b"0\r\n\r\n"))
                self.close_connection = fails
            else:
                match = re.match(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
                first = int(match[1]) if match else 0
                stop = min(int(match[2]) + 1, len(content)) if match and match[2] else len(content)
                ranged = {"Content-Range": f"bytes {first}-{stop - 1}/{len(content)}"} if match else {}
                self.send(206 if match else 200, content[first:stop], cut=fails, **ranged)

        def send(self, code, body, *, cut=False, **headers):
            self.send_response(code)
            headers |= {"Content-Length": len(body), "ETag": '"e"', "Accept-Ranges": "bytes"}
            for name, value in (headers | {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[: len(body) // 2] if cut else body)
            self.close_connection = cut

        do_GET = do_HEAD = answer

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # of a client that gave up
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1], requests
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
