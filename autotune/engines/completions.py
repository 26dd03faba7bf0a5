"""The two addresses of a server that the load needs: `/v1/completions` and `/metrics`."""

from __future__ import annotations

import json
import ssl
import time
from dataclasses import dataclass
from typing import Any

import httpx

from autotune.engines.metrics import Metrics, parse_metrics
from autotune.engines.prompts import Prompts

#: Characters of an answer's body that an error quotes.
_QUOTED = 200


class LoadError(Exception):
    """The load was not served; the message says in one line what happened instead."""


class ServerGone(LoadError):
    """The server's process has ended, or it refuses connections."""


class ServerStuck(LoadError):
    """A request was not answered within the time-out."""


class BadAnswer(LoadError):
    """The server answered with an error, or with another number of tokens than was asked for."""


class RequestFailed(BadAnswer):
    """One request was not served (HTTP 5xx, a dropped connection); the next one may be."""


@dataclass(frozen=True)
class Timing:
    """When the tokens of one request came.

    Attributes:
        first_ms: from sending the request to its first token.
        further_ms: from each further one to the next, on average; None when there was one token alone.
    """

    first_ms: float
    further_ms: float | None


class Completions:
    """Asks one server for completions of exact size, and for its metrics.

    Args:
        base_url: e.g. `http://127.0.0.1:8000`.
        model: the name under which the server serves the model.
        prompts: where prompts come from.
        request_timeout_s: the longest wait for one answer.
        api_key: sent with every request; None when the server wants none.

    Attributes:
        resent: requests sent a second time after the server dropped the connection.
        resent_tokens: output tokens that the server may have made for the first sending of those.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        prompts: Prompts,
        request_timeout_s: float,
        *,
        api_key: str | None = None,
    ) -> None:
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.resent = self.resent_tokens = 0
        self._base_url = base_url.rstrip("/")
        self._model = model
        self._prompts = prompts
        self.request_timeout_s = request_timeout_s
        # One for all connections; reading the certificate store takes up to 70 ms and http needs none.
        secure = base_url.startswith("https:")
        self._tls = ssl.create_default_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    def connection(self) -> httpx.AsyncClient:
        """A client with a connection of its own, kept alive, that ignores the proxies of the
        environment. One per slot, because httpx's pool walks through all its connections for every
        request, which 256 of them would feel.
        """
        transport = httpx.AsyncHTTPTransport(
            verify=self._tls, trust_env=False, limits=httpx.Limits(max_connections=None)
        )
        timeout = httpx.Timeout(self.request_timeout_s)
        return httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False)

    async def ask(
        self,
        http: httpx.AsyncClient,
        input_tokens: int,
        output_tokens: int,
        *,
        prefix: str = "",
        prefix_tokens: int = 0,
    ) -> None:
        """Has one new prompt completed, and checks the server's count of both kinds of token.

        Args:
            prefix, prefix_tokens: the beginning it shares with others (`Prompts.take`).

        Raises:
            LoadError: ServerGone, ServerStuck, RequestFailed or another BadAnswer.
        """
        prompt = self._prompts.take(input_tokens, prefix=prefix, prefix_tokens=prefix_tokens)
        body = self._body(prompt, output_tokens)
        answer = await self._send(http, "POST", "/v1/completions", body, output_tokens)
        if answer.status_code != 200:
            raise _refusal(answer)
        try:
            usage = answer.json()["usage"]
        except (ValueError, KeyError, TypeError):
            raise BadAnswer(f"an answer without token counts: {answer.text[:_QUOTED]}") from None
        _check_counts(usage, input_tokens, output_tokens, answer.text)

    async def ask_streamed(
        self,
        http: httpx.AsyncClient,
        input_tokens: int,
        output_tokens: int,
        *,
        prefix: str = "",
        prefix_tokens: int = 0,
    ) -> Timing:
        """As `ask`, token by token, with the times at which they came.

        Raises:
            LoadError: as `ask`; a connection that breaks is a failed request, since half an answer was read.
        """
        prompt = self._prompts.take(input_tokens, prefix=prefix, prefix_tokens=prefix_tokens)
        body = self._body(prompt, output_tokens, stream_options={"include_usage": True})
        headers = {**self._headers, "content-type": "application/json"}
        first = last = None
        usage, text = None, ""
        began = time.monotonic()
        try:
            url = f"{self._base_url}/v1/completions"
            async with http.stream("POST", url, content=body, headers=headers) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    raise _refusal(answer)
                async for line in answer.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    # Blank lines between events, and [DONE] at the end.
                    if not data.startswith("{"):
                        continue
                    text, piece = data, json.loads(data)
                    usage = piece.get("usage") or usage
                    if piece.get("choices"):
                        last = time.monotonic()
                        first = first or last
        except httpx.TimeoutException:
            raise ServerStuck(f"no answer within {self.request_timeout_s:g} s") from None
        except httpx.ConnectError as error:
            raise ServerGone(f"no connection to {self._base_url}: {error}") from error
        except httpx.TransportError as error:
            what = str(error) or type(error).__name__
            raise RequestFailed(f"the connection was dropped: {what}") from error
        except (ValueError, AttributeError):
            raise BadAnswer(f"a stream that cannot be read: {text[:_QUOTED]}") from None
        if first is None or last is None:
            raise BadAnswer("a stream without tokens")
        _check_counts(usage, input_tokens, output_tokens, text)
        further = (last - first) / (output_tokens - 1) if output_tokens > 1 else None
        return Timing(first_ms=1e3 * (first - began), further_ms=None if further is None else 1e3 * further)

    def _body(self, prompt: list[int], output_tokens: int, **streaming: Any) -> str:
        return json.dumps(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": bool(streaming),
                **streaming,
            }
        )

    async def metrics(self, http: httpx.AsyncClient) -> Metrics | None:
        """The server's metrics, None when it has no such page.

        Raises:
            LoadError: ServerGone or ServerStuck.
        """
        answer = await self._send(http, "GET", "/metrics", None)
        if answer.status_code != 200:
            return None
        try:
            return parse_metrics(answer.text)
        except ValueError:
            return None

    async def _send(
        self, http: httpx.AsyncClient, method: str, path: str, body: str | None, output_tokens: int = 0
    ) -> httpx.Response:
        headers = self._headers if body is None else {**self._headers, "content-type": "application/json"}
        url = self._base_url + path
        try:
            try:
                return await http.request(method, url, content=body, headers=headers)
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                # A server may close an idle connection (uvicorn after 5 s) just as it is used again.
                # If it was the end of the server, the second try is refused at once.
                if body is not None:
                    self.resent += 1
                    self.resent_tokens += output_tokens
                return await http.request(method, url, content=body, headers=headers)
        except httpx.TimeoutException:
            raise ServerStuck(f"no answer from {path} within {self.request_timeout_s:g} s") from None
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
            what = str(error) or type(error).__name__
            raise RequestFailed(f"the connection was dropped twice: {what}") from error
        except httpx.TransportError as error:
            what = str(error) or type(error).__name__
            raise ServerGone(f"no connection to {self._base_url}: {what}") from error


def _refusal(answer: httpx.Response) -> BadAnswer:
    """The error for an answer that is none; its body was read."""
    kind = RequestFailed if answer.status_code >= 500 else BadAnswer
    return kind(f"HTTP {answer.status_code}: {answer.text[:_QUOTED]}")


def _check_counts(usage: Any, input_tokens: int, output_tokens: int, text: str) -> None:
    """Compares the server's count of tokens with what was asked for.

    Raises:
        BadAnswer: there is none, or it is another.
    """
    try:
        counted_in, counted_out = usage["prompt_tokens"], usage["completion_tokens"]
    except (KeyError, TypeError):
        raise BadAnswer(f"an answer without token counts: {text[:_QUOTED]}") from None
    if counted_in != input_tokens:
        raise BadAnswer(f"sent {input_tokens} prompt tokens, the server counted {counted_in}")
    if counted_out != output_tokens:
        raise BadAnswer(f"asked for {output_tokens} output tokens, the server counted {counted_out}")
