import numpy as np

from tools.documents import hash_fraction, is_validation


def test_the_text_alone_deals_documents_evenly() -> None:
    fractions = np.array([hash_fraction(str(number), "validation") for number in range(4000)])
    assert np.all((fractions >= 0) & (fractions < 1))
    histogram = np.histogram(fractions, bins=10, range=(0, 1))[0]
    assert np.all(np.abs(histogram - 400) < 100)
    others = np.array([hash_fraction(str(number), "sample") for number in range(4000)])
    assert abs(np.corrcoef(fractions, others)[0, 1]) < 0.1
    assert is_validation("7", fractions[7] + 1e-9)
    assert not is_validation("7", fractions[7])
