#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.hpp"

// A test program is one test_*.cpp that includes this header once:
//
//     TEST(ring_wraps) { CHECK_EQ(span.size(), 2); }
//
// main() runs every TEST, or those whose names contain the first argument, and exits with 1 if a check fails, if a
// test ends by an exception or without having checked anything, or if no test ran.
namespace dflash::testing {

struct Test {
    const char * name;
    void (*body)();
};

inline std::vector<Test> & tests() {
    static std::vector<Test> all;
    return all;
}

struct Registration {
    Registration(const char * name, void (*body)()) { tests().push_back({name, body}); }
};

struct Counts {
    long checks = 0;
    long failures = 0;
};

inline Counts & counts() {
    static Counts current;
    return current;
}

/// Thrown by REQUIRE to leave a test whose further checks make no sense.
struct Abandon {};

inline void report(const char * file, int line, const std::string & text) {
    ++counts().failures;
    std::printf("%s:%d: %s\n", file, line, text.c_str());
}

inline bool expect(bool ok, const char * file, int line, const char * text) {
    ++counts().checks;
    if (!ok) {
        report(file, line, std::string("false: ") + text);
    }
    return ok;
}

template <class A, class B>
void expect_equal(const A & a, const B & b, const char * file, int line, const char * left, const char * right) {
    ++counts().checks;
    if (!(a == b)) {
        std::ostringstream text;
        text << left << " == " << right << ": " << a << " and " << b;
        report(file, line, text.str());
    }
}

inline void expect_near(double a, double b, double tolerance, const char * file, int line, const char * what) {
    ++counts().checks;
    if (!(std::fabs(a - b) <= tolerance)) { // also false for NaN
        std::ostringstream text;
        text.precision(9);
        text << what << ": " << a << " and " << b << " differ by more than " << tolerance;
        report(file, line, text.str());
    }
}

/// `part`: text that the message must contain.
template <class Body>
void expect_throws(Status status, const char * part, Body && body, const char * file, int line, const char * what) {
    ++counts().checks;
    try {
        body();
    } catch (const Error & error) {
        std::ostringstream text;
        text << what << " throws " << static_cast<int>(error.status()) << " \"" << error.what() << "\", want "
             << static_cast<int>(status) << " \"" << part << "\"";
        if (error.status() != status || std::strstr(error.what(), part) == nullptr) {
            report(file, line, text.str());
        }
        return;
    } catch (const std::exception & error) {
        report(file, line, std::string(what) + " throws a foreign exception: " + error.what());
        return;
    }
    report(file, line, std::string(what) + " does not throw");
}

/// True if the test passed.
inline bool run(const Test & test) {
    counts() = Counts{};
    try {
        test.body();
    } catch (const Abandon &) {
        // the failed REQUIRE has been reported
    } catch (const std::exception & error) {
        report(test.name, 0, std::string("unexpected exception: ") + error.what());
    }
    if (counts().checks == 0) {
        report(test.name, 0, "checks nothing");
    }
    if (counts().failures > 0) {
        std::printf("FAILED %s\n", test.name);
    }
    return counts().failures == 0;
}

} // namespace dflash::testing

#define TEST(name)                                                                                                     \
    static void test_##name();                                                                                         \
    static const dflash::testing::Registration registration_##name(#name, test_##name);                                \
    static void test_##name()

#define CHECK(condition) dflash::testing::expect(static_cast<bool>(condition), __FILE__, __LINE__, #condition)

#define REQUIRE(condition)                                                                                             \
    do {                                                                                                               \
        if (!CHECK(condition)) {                                                                                       \
            throw dflash::testing::Abandon{};                                                                          \
        }                                                                                                              \
    } while (false)

#define CHECK_EQ(a, b) dflash::testing::expect_equal((a), (b), __FILE__, __LINE__, #a, #b)

#define CHECK_NEAR(a, b, tolerance) dflash::testing::expect_near((a), (b), (tolerance), __FILE__, __LINE__, #a " ~ " #b)

/// The statement must throw dflash::Error with this status.
#define CHECK_THROWS(status, ...) CHECK_THROWS_WITH(status, "", __VA_ARGS__)

/// ... and `part` must occur in its message.
#define CHECK_THROWS_WITH(status, part, ...)                                                                           \
    dflash::testing::expect_throws((status), (part), [&] { (void)(__VA_ARGS__); }, __FILE__, __LINE__, #__VA_ARGS__)

int main(int argc, char ** argv) {
    const char * const part = argc > 1 ? argv[1] : "";
    int passed = 0;
    int failed = 0;
    for (const dflash::testing::Test & test : dflash::testing::tests()) {
        if (std::strstr(test.name, part) != nullptr) {
            ++(dflash::testing::run(test) ? passed : failed);
        }
    }
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 && passed > 0 ? 0 : 1;
}
