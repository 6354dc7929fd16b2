#include "state/prefix_snapshot.hpp"

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "base/ring_span.hpp"
#include "state/prefix_access.hpp"

namespace dflash {
namespace {

long long say(int64_t value) {
    return static_cast<long long>(value);
}

void check_tokens(const std::vector<int32_t> & tokens, int64_t position, int32_t n_vocab) {
    check(tokens.empty() || static_cast<int64_t>(tokens.size()) == position, Status::invalid,
          "%zu tokens of a snapshot at position %lld", tokens.size(), say(position));
    for (const int32_t token : tokens) {
        check(token >= 0 && token < n_vocab, Status::invalid, "token %d, want 0 to %d", token, n_vocab - 1);
    }
}

void check_parent(const SnapshotHeader & h, const std::vector<int32_t> & tokens, const PrefixSnapshot & parent) {
    check(parent.header().kind != SnapshotKind::thin, Status::mismatch, "a thin snapshot has no state to go on from");
    check_same_target(parent.header(), "the parent", h, "the snapshot");
    check(parent.position() < h.position, Status::mismatch,
          "nothing was added: the parent is at %lld, the cache at %lld", say(parent.position()), say(h.position));
    check(parent.depth() < max_snapshot_depth, Status::mismatch, "the parent has %d parents, at most %d are walked",
          parent.depth(), max_snapshot_depth);
    check(!tokens.empty() && !parent.tokens().empty(), Status::mismatch,
          "a delta needs the tokens of its parent and its own");
    check(std::equal(parent.tokens().begin(), parent.tokens().end(), tokens.begin()), Status::mismatch,
          "the parent's tokens are no prefix of the snapshot's");
}

/// First draft rows to store: those behind the parent's, where the parent has all that come before.
void share_draft_rows(SnapshotHeader & h, const PrefixSnapshot & parent) {
    const SnapshotHeader & p = parent.header();
    if (!h.has_draft() || p.draft_digest != h.draft_digest || p.draft_cursor > h.draft_cursor) {
        return;
    }
    check_same_drafter(p, "the parent", h, "the snapshot");
    for (size_t i = 0; i < h.draft_rows.size(); ++i) {
        if (p.draft_held[i] <= h.draft_held[i]) {
            h.draft_rows[i] = std::max(h.draft_held[i], p.draft_cursor);
        }
    }
}

} // namespace

PrefixSnapshot::~PrefixSnapshot() {
    wait();
    // A chain is taken apart here, link by link, and not by one destructor inside the other.
    SnapshotPtr next = std::move(parent_);
    while (next && next.use_count() == 1) {
        SnapshotPtr above = const_cast<PrefixSnapshot &>(*next).parent_;
        const_cast<PrefixSnapshot &>(*next).parent_.reset();
        next = std::move(above);
    }
}

uint64_t PrefixSnapshot::bytes() const {
    uint64_t n = tokens_.size() * sizeof(int32_t) + logits_.size() * sizeof(float);
    for (const SnapshotPart & part : parts_) {
        n += part.n_bytes;
    }
    return n;
}

uint64_t PrefixSnapshot::allocated_bytes() const {
    const uint64_t memory = host_memory_ ? host_memory_->size() : device_memory_ ? device_memory_->bytes() : 0;
    return memory + tokens_.size() * sizeof(int32_t) + logits_.size() * sizeof(float);
}

void PrefixSnapshot::wait() const {
    done_.wait();
    draft_done_.wait();
}

void PrefixSnapshot::read(const SnapshotPart & part, void * out) const {
    wait();
    if (host_memory_) {
        std::memcpy(out, host_memory_->data() + part.offset, part.n_bytes);
    } else {
        const auto guard = device_->lock();
        device_->synchronize();
        tensor_read(blob_, out, part.offset, part.n_bytes);
    }
}

std::shared_ptr<PrefixSnapshot> SnapshotAccess::make(SnapshotHeader header,
                                                     const std::shared_ptr<const TargetModel> & target,
                                                     const std::shared_ptr<const DraftModel> & draft,
                                                     SnapshotPtr parent, std::vector<int32_t> tokens,
                                                     std::vector<float> logits, bool on_device) {
    std::shared_ptr<PrefixSnapshot> s(new PrefixSnapshot);
    check((header.kind == SnapshotKind::delta) == (parent != nullptr), Status::format,
          "a delta has a parent and nothing else has");
    check_tokens(tokens, header.position, target->config().n_vocab);
    check(logits.empty() || logits.size() == static_cast<size_t>(target->config().n_vocab), Status::format,
          "%zu logits, the model has %d", logits.size(), target->config().n_vocab);
    if (parent) {
        check_parent(header, tokens, *parent);
        check(header.kv_begin == parent->position(), Status::format, "K/V rows from %lld, the parent ends at %lld",
              say(header.kv_begin), say(parent->position()));
        for (size_t i = 0; i < header.draft_rows.size(); ++i) {
            const bool covered =
                header.draft_rows[i] == header.draft_held[i] ||
                (parent->header().draft_digest == header.draft_digest && i < parent->header().draft_held.size() &&
                 parent->header().draft_held[i] <= header.draft_held[i] &&
                 header.draft_rows[i] <= parent->header().draft_cursor);
            check(covered, Status::format, "draft rows of layer %zu: the parent does not have [%lld, %lld)", i,
                  say(header.draft_held[i]), say(header.draft_rows[i]));
        }
        s->depth_ = parent->depth() + 1;
    }
    s->parts_ = snapshot_parts(header, *target, draft.get());
    s->header_ = std::move(header);
    s->device_ = target->device();
    s->draft_device_ = draft ? draft->device() : nullptr;
    const uint64_t n_bytes = parts_bytes(s->parts_);
    if (on_device) {
        s->device_memory_ = std::make_unique<TensorGroup>(s->device_, 1);
        s->blob_ = s->device_memory_->add(GGML_TYPE_I8, "prefix_snapshot", static_cast<int64_t>(n_bytes));
        s->device_memory_->allocate("prefix snapshot");
    } else {
        s->host_memory_ = std::make_unique<HostMemory>(s->device_, n_bytes, "prefix snapshot");
    }
    s->token_digest_ = tokens.empty() ? "" : token_digest(tokens);
    s->tokens_ = std::move(tokens);
    s->logits_ = std::move(logits);
    s->parent_ = std::move(parent);
    return s;
}

void SnapshotAccess::fetch(PrefixSnapshot & s, Device & device, const SnapshotPart & part, uint64_t at,
                           const ggml_tensor * from, uint64_t offset, uint64_t n_bytes) {
    if (s.host_memory_) {
        tensor_read_async(device, from, s.host_memory_->data() + part.offset + at, offset, n_bytes);
    } else {
        tensor_copy_range(from, offset, s.blob_, part.offset + at, n_bytes);
    }
}

void SnapshotAccess::put(const PrefixSnapshot & s, Device & device, const SnapshotPart & part, uint64_t at,
                         ggml_tensor * to, uint64_t offset, uint64_t n_bytes) {
    if (s.host_memory_) {
        tensor_write_async(device, to, s.host_memory_->data() + part.offset + at, offset, n_bytes);
    } else {
        tensor_copy_range(s.blob_, part.offset + at, to, offset, n_bytes);
    }
}

void SnapshotAccess::mark(PrefixSnapshot & s) {
    s.done_.set(*s.device_);
    if (s.draft_device_ && s.draft_device_ != s.device_) {
        const auto guard = s.draft_device_->lock();
        s.draft_done_.set(*s.draft_device_);
    }
}

std::vector<PartRun> runs_of(const SnapshotPart & part, int64_t begin, int64_t n, const TargetCache & cache,
                             const DraftContext * context) {
    const uint64_t row = part.rows > 0 ? part.n_bytes / static_cast<uint64_t>(part.rows) : 0;
    int64_t capacity = 0;
    int64_t offset = 0;
    switch (part.source) {
    case SnapshotPart::Source::k:
    case SnapshotPart::Source::v:
        capacity = cache.physical_capacity();
        break;
    case SnapshotPart::Source::recurrent:
    case SnapshotPart::Source::conv:
        return {{0, 0, part.n_bytes}};
    case SnapshotPart::Source::features:
        capacity = cache.feature_capacity();
        break;
    case SnapshotPart::Source::draft_k:
    case SnapshotPart::Source::draft_v:
        capacity = context->ring_capacity(part.layer);
        offset = context->ring_offset();
        break;
    }
    std::vector<PartRun> runs;
    for (const RingRun & run : RingSpan(capacity, begin, n)) {
        runs.push_back({static_cast<uint64_t>(begin - part.begin + run.first) * row,
                        static_cast<uint64_t>(offset + run.row) * row, static_cast<uint64_t>(run.count) * row});
    }
    return runs;
}

namespace {

SnapshotPtr take(const TargetCache & cache, const DraftContext * context, SnapshotHeader header, SnapshotPtr parent,
                 std::vector<int32_t> tokens, bool on_device) {
    const auto & device = cache.model().device();
    std::vector<float> logits = header.kind == SnapshotKind::thin ? std::vector<float>() : cache.last_logits;
    auto snapshot = SnapshotAccess::make(std::move(header), cache.model_handle(),
                                         context != nullptr ? context->model_handle() : nullptr, std::move(parent),
                                         std::move(tokens), std::move(logits), on_device);
    const auto guard = device->lock();
    for (const SnapshotPart & part : snapshot->parts()) {
        const ggml_tensor * tensor = tensor_of(part, cache, context);
        check(!spans_devices(tensor), Status::unsupported, "%s lies on several devices", part.name.c_str());
        Device & owner = of_drafter(part) ? *context->model().device() : *device;
        const auto drafter_guard = owner.lock();
        for (const PartRun & run : runs_of(part, part.begin, part.rows, cache, context)) {
            SnapshotAccess::fetch(*snapshot, owner, part, run.at, tensor, run.offset, run.n_bytes);
        }
    }
    SnapshotAccess::mark(*snapshot);
    return snapshot;
}

} // namespace

SnapshotPtr snapshot_target_cache(const TargetCache & cache, const DraftContext * context, SnapshotOptions options) {
    check(cache.position() >= 1, Status::invalid, "the cache holds no tokens");
    const PositionRange features = cache.feature_range();
    // A drafter that lost rows it never read, as after a failure, has nothing that one could go on from.
    if (context != nullptr && (context->cursor() > cache.position() || context->cursor() < features.begin)) {
        context = nullptr;
    }
    SnapshotHeader h = header_of(cache, context);
    h.kind = options.parent ? SnapshotKind::delta : SnapshotKind::full;
    h.position = cache.position();
    h.features = {h.position, h.position};
    if (cache.target_feat() != nullptr && options.features != SnapshotFeatures::none) {
        const bool tail = options.features == SnapshotFeatures::tail && context != nullptr;
        h.features.begin = tail ? std::max(context->cursor(), features.begin) : features.begin;
    }
    if (context != nullptr) {
        check(options.features != SnapshotFeatures::none || context->cursor() == h.position, Status::invalid,
              "the drafter has read up to %lld of %lld tokens: the features behind that are needed",
              say(context->cursor()), say(h.position));
        h.draft_begin = context->begin();
        h.draft_cursor = context->cursor();
        h.draft_high = context->high();
        for (int32_t i = 0; i < context->model().config().n_layer; ++i) {
            h.draft_held.push_back(std::min(context->layer_begin(i), h.draft_cursor));
        }
        h.draft_rows = h.draft_held;
    }
    if (options.parent) {
        check_parent(h, options.tokens, *options.parent);
        h.kv_begin = options.parent->position();
        share_draft_rows(h, *options.parent);
    }
    return take(cache, context, std::move(h), std::move(options.parent), std::move(options.tokens), options.on_device);
}

SnapshotPtr snapshot_target_cache_thin(const TargetCache & cache, int64_t kv_start, int64_t kv_end,
                                       std::vector<int32_t> tokens) {
    check(kv_start >= 0 && kv_start < kv_end && kv_end <= cache.position(), Status::invalid,
          "K/V of positions [%lld, %lld), the cache holds [0, %lld)", say(kv_start), say(kv_end),
          say(cache.position()));
    SnapshotHeader h = header_of(cache, nullptr);
    h.kind = SnapshotKind::thin;
    h.position = kv_end;
    h.kv_begin = kv_start;
    h.features = {kv_end, kv_end};
    return take(cache, nullptr, std::move(h), nullptr, std::move(tokens), false);
}

SnapshotPtr import_snapshot(const SnapshotHeader & header, std::shared_ptr<const TargetModel> target,
                            std::shared_ptr<const DraftModel> draft, SnapshotPtr parent, std::vector<int32_t> tokens,
                            std::vector<float> logits, const std::vector<const void *> & data,
                            const std::vector<uint64_t> & n_bytes) {
    if (!header.has_draft()) {
        draft = nullptr;
    }
    // Sizes first, so that numbers from a damaged file cannot make this allocate.
    const std::vector<SnapshotPart> parts = snapshot_parts(header, *target, draft.get());
    check(data.size() == parts.size() && n_bytes.size() == parts.size(), Status::format, "%zu parts, want %zu",
          data.size(), parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
        check(n_bytes[i] == parts[i].n_bytes, Status::format, "%s has %llu bytes, want %llu", parts[i].name.c_str(),
              static_cast<unsigned long long>(n_bytes[i]), static_cast<unsigned long long>(parts[i].n_bytes));
        check(data[i] != nullptr || n_bytes[i] == 0, Status::invalid, "%s has no data", parts[i].name.c_str());
    }
    auto snapshot =
        SnapshotAccess::make(header, target, draft, std::move(parent), std::move(tokens), std::move(logits), false);
    for (size_t i = 0; i < parts.size(); ++i) {
        if (n_bytes[i] > 0) {
            std::memcpy(SnapshotAccess::host_bytes(*snapshot) + parts[i].offset, data[i], n_bytes[i]);
        }
    }
    return snapshot;
}

void free_prefix_snapshot(SnapshotPtr & snapshot) {
    snapshot.reset();
}

} // namespace dflash
