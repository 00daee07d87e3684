"""llm/ and its environment: addresses and keys that cannot be used, secrets that nobody sees."""

import base64

from llm import benchmark as llm
from tests.common import assert_refused, contents
from tests.scripted_server import KEY, attempts_in, environment, run_llm, scripted_server


def test_llm_unusable_addresses_and_keys_get_one_line_without_secrets(tmp_path):
    flags = "--model", "m", "--retries", 0, "--out", tmp_path / "a"
    for url in (
        "http://127.0.0.1:port/v1",
        "http://127.0.0.1:65545/v1",  # which is port 9 to the client
        "http://127.0.0.1:-1/v1",
        "http://127.0.0.1:0/v1",
        "http://[::1",
        "http://[zz]/v1",
        "127.0.0.1:9/v1",
        "ftp://127.0.0.1:9/v1",
        "http:///v1",
        "http://127.0.0.1:9/v1?key=secret",
        "http://user:sec@ret@127.0.0.1:9/v1",
        "http://user:secret/secret@127.0.0.1:9/v1",
        "http://user:12/secret@127.0.0.1:9/v1",  # 12 looks like a port
        "http://user:12#secret@127.0.0.1:9/v1",
        "http://user:secret@127.0.0.1:99999/v1",
    ):
        with environment(url):
            _, _, err = run_llm(*flags)
            assert "ret" not in err, err
            assert_refused(llm, *flags, says="OPENAI_BASE_URL is no address of a server")
    for key in ("sk-sécret-of-mine", "sk-secret\x1b[31m"):
        with environment("http://127.0.0.1:9/v1", key=key):
            assert_refused(llm, *flags, says="OPENAI_API_KEY holds a character that no key has")
    with environment("http://127.0.0.1:9/v1", HTTPS_PROXY="http://user:secret#1@host"):
        _, _, err = run_llm(*flags)
        assert "secret" not in err
        assert_refused(llm, *flags, says="the proxy variables")
    assert not contents(tmp_path), "nothing is begun"
    with environment("http://127.0.0.1:9/v1", OPENAI_ORG_ID="é"):
        assert_refused(llm, *flags, says="(UnicodeEncodeError)")


def test_llm_secrets_in_the_address_are_used_but_never_shown(tmp_path):
    path, flags = tmp_path / "a", "--model m --D 5 --retries 0 --out".split()
    basic = base64.b64encode(b"me:pass@w/rd").decode()
    secrets = "pass%40w%2Frd", "pass@w/rd", basic, KEY, "t0ken-of-mine"

    def hidden(*said):
        files = [content.decode() for content in contents(tmp_path).values()]
        assert not [secret for secret in secrets if secret in "".join([*said, *files])]

    faults = [None] * 5 + ["indiscreet", "web page", "silent"]
    with scripted_server(faults=lambda n: faults[n] if n < len(faults) else None) as server:
        address = server.url.replace("/v1", "/t0ken-of-mine/v1")
        with_login = address.replace("//", "//me:pass%40w%2Frd@")
        with environment(with_login):
            assert run_llm(*flags, path, "--n", 1)[0] == 0
            assert server.logins == {"Basic " + basic} and "/***/v1" in path.read_text()
            hidden()
            for says in ("not allowed: Basic ***, that is ***, at ***/ch", "sign in", "(Read"):
                code, out, err = run_llm(*flags, path, "--n", 2, "--timeout", 0.5)
                assert code == 2 and says in err, err
                hidden(out, err)

        # the address without the login is the same endpoint, also where an older file holds it
        with environment(address):
            assert run_llm(*flags, path, "--n", 2)[0] == 0
            path.write_text(
                path.read_text().replace(server.url.replace("v1", "***/v1"), with_login)
            )
            assert with_login in path.read_text() and run_llm(*flags, path, "--n", 2)[0] == 0
            code, out, err = run_llm(*flags, path, "--n", 2, "--seed", 1)
            assert code == 2 and not [secret for secret in secrets if secret in out + err]


def test_llm_short_key_stands_for_none_and_blots_nothing_out(tmp_path):
    with scripted_server() as server, environment(server.url, key="a"):
        assert run_llm("--model", "m", "--n", 3, "--D", 5, "--out", tmp_path / "a")[0] == 0
    attempts = [attempts[-1] for attempts in attempts_in(tmp_path / "a").values()]
    assert all(attempt["answer"] == attempt["expected"] for attempt in attempts)
