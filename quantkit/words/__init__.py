"""INT4 words that calibration chose, on their way into an output: written once, then read in rows."""

from quantkit.words.file import Words, WordsWriter, finish_words, has_words, open_words, words_bytes, write_words

__all__ = ["Words", "WordsWriter", "finish_words", "has_words", "open_words", "words_bytes", "write_words"]
