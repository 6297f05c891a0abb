"""`python -m capibara`: the command line, where no `capibara` is on the path."""

from capibara.cli.main import app

if __name__ == "__main__":
    app(prog_name="capibara")
