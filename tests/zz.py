import os
from tests.spawn import run_ranks, launch
class C:
    x = 3
def f(rank, n, c):
    print("hello")
    return rank, os.environ.get("DS_ACCELERATOR"), c.x
if __name__ == "__main__":
    print(run_ranks(f, 2, C()))
    print([ (r.value, r.error, r.traceback) for r in launch(f, 1, C(), env={"DS_ACCELERATOR": "cuda"})])
