"""The web page of waste-serve, driven through ChromeDriver: python3 test-ui.py WASTE_SERVE [PICTURE.png]"""

import base64
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
           "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=900,800"]


class Browser:
    def __init__(self, profile):
        self.driver = subprocess.Popen(["chromedriver", "--port=9515"], stdout=subprocess.DEVNULL)
        self.base = "http://127.0.0.1:9515/session"
        chrome = {"args": [*OPTIONS, f"--user-data-dir={profile}"]}
        capabilities = {"alwaysMatch": {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}}
        for attempt in range(50):
            try:
                made = self.call("POST", "", {"capabilities": capabilities})
                break
            except urllib.error.URLError:
                time.sleep(0.1)
        else:
            raise AssertionError("chromedriver does not answer")
        self.base += "/" + made["sessionId"]

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["value"]

    def open(self, url):
        self.call("POST", "/url", {"url": url})

    def run(self, script):
        return self.call("POST", "/execute/sync", {"script": script, "args": []})

    def find(self, css):
        element = self.call("POST", "/element", {"using": "css selector", "value": css})
        return "/element/" + next(iter(element.values()))

    def click(self, css):
        self.call("POST", self.find(css) + "/click", {})

    def type(self, css, text):
        self.call("POST", self.find(css) + "/value", {"text": text})

    def until(self, script, what):
        end = time.time() + 60
        while time.time() < end:
            value = self.run("return " + script)
            if value:
                return value
            time.sleep(0.1)
        raise AssertionError(f"not in a minute: {what}")

    def picture(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("GET", "/screenshot")))

    def errors(self):
        return [entry for entry in self.call("POST", "/se/log", {"type": "browser"}) if entry["level"] == "SEVERE"]

    def end(self):
        try:
            self.call("DELETE", "")
        finally:
            self.driver.terminate()


def serve(model, *args):
    command = [sys.argv[1], model, "--port", "0", "--json", "--ctx", "1024", *args]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return server, json.loads(server.stdout.readline())["addr"]


def talks(browser, url):
    browser.open(url + "/")
    browser.until("document.title === 'k3-tales'", "the model's name")
    assert "of RAM" in browser.run("return document.getElementById('facts').textContent")
    browser.run("document.getElementById('tokens').value = 60")
    browser.type("#text", "Tell me a story.\n")
    browser.until("document.querySelector('#live').textContent.includes('tok/s')", "the speed while it writes")
    browser.until("document.querySelector('article.assistant footer')", "the end of the answer")
    answer = browser.run("return document.querySelector('article.assistant').textContent")
    assert len(answer) > 60 and "tok/s" in answer, answer
    assert browser.run("return document.querySelector('article.assistant details')?.open") is False, "thinking is folded"


def goes_on(browser, _):
    browser.type("#text", "And then?\n")
    browser.until("document.querySelectorAll('article.assistant footer').length === 2", "the second answer")


def stops(browser, _):
    browser.run("document.getElementById('tokens').value = 800")
    browser.type("#text", "A long one.\n")
    browser.until("document.querySelectorAll('article.assistant')[2]?.textContent.length > 20", "some of it")
    # It may have come to its end by itself.
    browser.run("document.getElementById('stop').click()")
    browser.until("!document.getElementById('send').hidden", "the end of it")
    browser.click("#new")
    assert browser.run("return document.querySelectorAll('article').length") == 0


def errors_are_shown(browser, _):
    browser.run("document.getElementById('temperature').value = 9; document.getElementById('ask').noValidate = true")
    browser.type("#text", "Too hot.\n")
    browser.until("document.querySelector('article.wrong')?.textContent.includes('temperature')", "the error")
    assert browser.run("return document.getElementById('text').value") == "Too hot."


def markup_is_text(browser, url):
    browser.open(url + "/")
    browser.until("document.title === 'k3-tales'", "the model's name")
    browser.run("document.getElementById('tokens').value = 4")
    browser.type("#text", "<img src=x onerror=document.title='bad'>\n")
    browser.until("document.querySelector('article.assistant footer')", "the answer")
    assert browser.run("return document.querySelectorAll('article img').length") == 0
    assert browser.run("return document.title") == "k3-tales"


def sees(browser, _):
    assert browser.run("return document.getElementById('attach').checkVisibility()") is False, "k3-tales sees nothing"
    server, url = serve("tests/interop/tiny-k3.waste", "--vision")
    try:
        browser.open(url + "/")
        browser.until("document.getElementById('attach').checkVisibility()", "where images are chosen")
        browser.run("document.getElementById('tokens').value = 4")
        browser.type("#images", os.path.abspath("tests/golden/tiny-k3/image.png"))
        browser.type("#text", "What is it?\n")
        browser.until("document.querySelector('article.assistant footer')", "the answer")
        assert browser.run("return document.querySelector('article.user img').naturalWidth") == 75
        assert browser.run("return document.getElementById('images').files.length") == 0
        browser.type("#text", "And now?\n")
        browser.until("document.querySelectorAll('article.assistant footer').length === 2", "the second answer")
        with urllib.request.urlopen(url + "/metrics", timeout=60) as metrics:
            assert b"\nwaste_images_encoded_total 1\n" in metrics.read()
    finally:
        server.terminate()


def main():
    server, url = serve("tests/models/k3-tales")
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            browser = Browser(profile)
            tests = [talks, goes_on, stops, errors_are_shown, markup_is_text, sees]
            try:
                for test in tests:
                    test(browser, url)
                    if test is goes_on and len(sys.argv) > 2 and sys.argv[2]:
                        browser.picture(sys.argv[2])
                    print(f"ok {test.__name__}", flush=True)
                # The one error is the answer 400 that was provoked.
                wrong = [error for error in browser.errors() if "400" not in error["message"]]
                assert not wrong, wrong
            finally:
                browser.end()
    finally:
        server.terminate()
    assert server.wait(60) == 0
    print(f"{len(tests)} passed")


main()
