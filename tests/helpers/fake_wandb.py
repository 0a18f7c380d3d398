"""A fake of the service of Weights & Biases, which can't be reached from a test: as much of it as a
run needs to begin, after which it is gone."""

import json
import threading
from http.server import BaseHTTPRequestHandler

# the client asks again and again for 90 seconds: here only once
WANDB = {
    "WANDB_API_KEY": "a" * 40,
    "WANDB__GRAPHQL_RETRY_MAX": "1",
    "WANDB__GRAPHQL_RETRY_WAIT_MIN_SECONDS": "0.1",
    "WANDB__GRAPHQL_RETRY_WAIT_MAX_SECONDS": "0.1",
    "WANDB_ERROR_REPORTING": "false",
}


VIEWER = {"id": "me", "entity": "we", "flags": "{}", "teams": {"edges": []}}
BUCKET = {
    "id": "run",
    "name": "run",
    "displayName": "run",
    "project": {"name": "maxent-grpo", "entity": {"name": "we"}},
}


class Service(BaseHTTPRequestHandler):
    """It begins one run, and is gone."""

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        begins = b"upsertBucket" in self.rfile.read(length)
        answer = {"viewer": VIEWER}
        if begins:
            answer = {"upsertBucket": {"bucket": BUCKET, "inserted": True}}
        body = json.dumps({"data": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if begins:
            self.server.begun = True
            threading.Thread(target=self.go).start()

    def go(self):
        self.server.shutdown()
        self.server.server_close()

    def log_message(self, *args):
        pass
