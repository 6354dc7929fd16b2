"""Text in and out: tokenizer, chat template, stop strings, UTF-8. Needs no compiled module."""

from pydflash.text.chat_template import ChatTemplate
from pydflash.text.stop import StopMatch, StopMatcher
from pydflash.text.tokenizer import Tokenizer
from pydflash.text.utf8 import Utf8Stream
from pydflash.text.vocabulary import FimTokens, Vocabulary

__all__ = ["ChatTemplate", "FimTokens", "StopMatch", "StopMatcher", "Tokenizer", "Utf8Stream", "Vocabulary"]
