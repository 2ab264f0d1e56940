"""Operations outside steps: storage, transfer and compilation of grammars."""
