#include "check.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>

#include "capi/shim.hpp"

using dflash::Status;
using namespace dflash::capi;

namespace {

struct Lamp : Handle {
    static constexpr const char * noun = "lamp";
    explicit Lamp(int * count) : alive(count) { ++*alive; }
    ~Lamp() override { --*alive; }
    int * alive;
    int brightness = 7;
};

struct Kettle : Handle {
    static constexpr const char * noun = "kettle";
};

struct lamp_options {
    uint32_t struct_size;
    int32_t brightness;
    int64_t since_version_2;
};

} // namespace

TEST(open_use_and_free) {
    int alive = 0;
    Lamp * lamp = nullptr;
    publish(&lamp, std::make_shared<Lamp>(&alive));
    REQUIRE(lamp != nullptr);
    CHECK_EQ(Use<Lamp>(lamp)->brightness, 7);
    CHECK_EQ(alive, 1);
    release(lamp);
    CHECK_EQ(alive, 0);
    CHECK_THROWS_WITH(Status::invalid, "closed", Use<Lamp>(lamp));
    release(lamp);
    release(static_cast<Lamp *>(nullptr));
    CHECK_THROWS_WITH(Status::invalid, "lamp handle is NULL", Use<Lamp>(nullptr));
}

TEST(foreign_handles_are_refused) {
    Kettle * kettle = nullptr;
    publish(&kettle, std::make_shared<Kettle>());
    Lamp * const disguised = reinterpret_cast<Lamp *>(kettle);
    CHECK_THROWS_WITH(Status::invalid, "not of type lamp", borrow(disguised));
    release(disguised);
    CHECK(borrow(kettle) != nullptr);
    release(kettle);
    int not_a_handle = 0;
    CHECK_THROWS(Status::invalid, borrow(reinterpret_cast<Lamp *>(&not_a_handle)));
}

TEST(second_entry_is_busy) {
    int alive = 0;
    Lamp * lamp = nullptr;
    publish(&lamp, std::make_shared<Lamp>(&alive));
    {
        const Use<Lamp> first(lamp);
        CHECK_THROWS_WITH(Status::busy, "lamp is in use", Use<Lamp>(lamp));
        CHECK(borrow(lamp) != nullptr);
        dflash_status other = DFLASH_STATUS_OK;
        std::thread thread([&] { other = guard(nullptr, [&] { Use<Lamp> second(lamp); }); });
        thread.join();
        CHECK_EQ(static_cast<int>(other), static_cast<int>(DFLASH_STATUS_BUSY));
        release(lamp);
        CHECK_EQ(alive, 1); // the running call still holds it
        CHECK_EQ(first->brightness, 7);
    }
    CHECK_EQ(alive, 0);
}

TEST(use_after_fork_is_invalid) {
    int alive = 0;
    Lamp * lamp = nullptr;
    publish(&lamp, std::make_shared<Lamp>(&alive));
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        const dflash_status inherited = guard(nullptr, [&] { Use<Lamp> use(lamp); });
        Lamp * own = nullptr;
        const dflash_status fresh = guard(nullptr, [&] {
            publish(&own, std::make_shared<Lamp>(&alive));
            Use<Lamp> use(own);
        });
        _exit(inherited == DFLASH_STATUS_INVALID && fresh == DFLASH_STATUS_OK ? 0 : 1);
    }
    int result = -1;
    REQUIRE(waitpid(child, &result, 0) == child);
    CHECK(WIFEXITED(result) && WEXITSTATUS(result) == 0);
    CHECK_EQ(Use<Lamp>(lamp)->brightness, 7);
    release(lamp);
}

TEST(guard_translates_every_exception) {
    dflash_error err = DFLASH_ERROR_INIT;
    CHECK_EQ(static_cast<int>(guard(&err, [] {})), 0);
    CHECK_EQ(err.status, 0);
    CHECK_EQ(std::string(err.message), "");
    CHECK_EQ(static_cast<int>(guard(&err, [] { dflash::fail(Status::capacity, "%d rows", 3); })), -8);
    CHECK_EQ(err.status, -8);
    CHECK_EQ(std::string(err.message), "3 rows");
    CHECK_EQ(static_cast<int>(guard(&err, [] { throw std::bad_alloc(); })), -2);
    CHECK_EQ(static_cast<int>(guard(&err, [] { throw std::runtime_error("odd"); })), -99);
    CHECK_EQ(std::string(err.message), "odd");
    CHECK_EQ(static_cast<int>(guard(&err, [] { throw 5; })), -99);
    CHECK_EQ(static_cast<int>(guard(nullptr, [] { throw 5; })), -99);
}

TEST(error_text_fits_the_callers_struct) {
    const std::string text = std::string(1014, 'a') + "\xC3\xA9"; // one byte too long, and that byte splits a character
    dflash_error err = DFLASH_ERROR_INIT;
    fill_error(&err, Status::format, text.c_str());
    CHECK_EQ(std::string(err.message), std::string(1014, 'a'));

    dflash_error zero = {};
    fill_error(&zero, Status::format, "text");
    CHECK_EQ(std::string(zero.message), "text");

    dflash_error small = DFLASH_ERROR_INIT;
    std::memset(small.message, 'x', sizeof(small.message));
    small.struct_size = 12;
    fill_error(&small, Status::format, "text");
    CHECK_EQ(std::string(small.message, 5), std::string("tex\0x", 5));
    small.struct_size = 8;
    small.status = 1;
    fill_error(&small, Status::format, "text");
    CHECK_EQ(small.status, 1);
}

TEST(options_of_older_and_newer_callers) {
    const lamp_options defaults = {sizeof(lamp_options), 5, 9};
    CHECK_EQ(read_options<lamp_options>(nullptr, defaults, 8, "options").brightness, 5);
    const lamp_options older = {8, 3, 4};
    CHECK_EQ(read_options(&older, defaults, 8, "options").brightness, 3);
    CHECK_EQ(read_options(&older, defaults, 8, "options").since_version_2, 9);
    const lamp_options below = {4, 3, 4};
    CHECK_THROWS_WITH(Status::invalid, "options.struct_size is 4", read_options(&below, defaults, 8, "options"));
    struct {
        lamp_options known;
        int64_t unknown;
    } newer = {{24, 3, 4}, 0};
    CHECK_EQ(read_options(&newer.known, defaults, 8, "options").since_version_2, 4);
    CHECK_EQ(read_options(&newer.known, defaults, 8, "options").struct_size, sizeof(lamp_options));
    newer.unknown = 1;
    CHECK_THROWS(Status::unsupported, read_options(&newer.known, defaults, 8, "options"));
}
