"""Stands for a server in tests of its life: `python -m tests.unit.fake_http_server --port N [--fail | --hang]`.

Healthy at once, never with --hang; exits with an error with --fail. Has two child processes, as SGLang's has: one
that is killed when its parent dies, and one that only ends by itself, at the end of its input.
"""

import argparse
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--nccl-port")
parser.add_argument("--fail", action="store_true")
parser.add_argument("--hang", action="store_true")
args = parser.parse_args()


class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, format, *values):
        pass


# As SGLang's: dies with its parent.
CHILD = "import ctypes, time; ctypes.CDLL(None).prctl(1, 9); print('ready', flush=True); time.sleep(600)"
if args.fail:
    sys.exit("cannot load the model")
subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE).stdout.readline()
# As the resource tracker of Python's multiprocessing.
tracker = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
if args.hang:
    time.sleep(600)
HTTPServer((args.host, args.port), Health).serve_forever()
