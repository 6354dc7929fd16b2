#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace dflash::testing {

/// P(X >= x) of a chi-square variable: the regularised upper incomplete gamma function Q(dof / 2, x / 2), by its series
/// (DLMF 8.7.1) below the mean and by its continued fraction (DLMF 8.9.2, evaluated by Lentz's method) above.
inline double chi_square_tail(double x, int dof) {
    const double a = dof / 2.0;
    const double z = x / 2.0;
    if (z <= 0.0) {
        return 1.0;
    }
    const double front = std::exp(a * std::log(z) - z - std::lgamma(a));
    if (z < a + 1.0) {
        double term = 1.0 / a;
        double sum = term;
        for (int k = 1; k < 10000 && term > sum * 1e-16; ++k) {
            term *= z / (a + k);
            sum += term;
        }
        return 1.0 - front * sum;
    }
    double b = z + 1.0 - a;
    double c = 1e300;
    double d = 1.0 / b;
    double fraction = d;
    for (int k = 1; k < 10000; ++k) {
        const double numerator = -k * (k - a);
        b += 2.0;
        d = 1.0 / (numerator * d + b);
        c = b + numerator / c;
        fraction *= c * d;
        if (std::fabs(c * d - 1.0) < 1e-15) {
            break;
        }
    }
    return front * fraction;
}

/// The probability that a sample of `law` fits it no better than `counts` do (Pearson's test). Outcomes expected less
/// than 5 times are pooled. 0 when an impossible outcome was counted.
inline double fit_p_value(const std::vector<int64_t> & counts, const std::vector<double> & law) {
    int64_t n = 0;
    for (const int64_t count : counts) {
        n += count;
    }
    double statistic = 0.0;
    double pooled_expected = 0.0;
    double pooled_count = 0.0;
    int bins = 0;
    const auto add = [&](double count, double expected) {
        statistic += (count - expected) * (count - expected) / expected;
        ++bins;
    };
    for (size_t i = 0; i < law.size(); ++i) {
        const double expected = law[i] * static_cast<double>(n);
        const auto count = static_cast<double>(counts[i]);
        if (law[i] == 0.0) {
            if (counts[i] > 0) {
                return 0.0;
            }
        } else if (expected < 5.0) {
            pooled_expected += expected;
            pooled_count += count;
        } else {
            add(count, expected);
        }
    }
    if (pooled_expected >= 1.0) {
        add(pooled_count, pooled_expected);
    }
    return bins > 1 ? chi_square_tail(statistic, bins - 1) : 1.0;
}

} // namespace dflash::testing
