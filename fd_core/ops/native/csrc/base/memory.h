// Memory in 2 MiB pages: reading weights page by page of 4 KiB spends a fifth of the time on address translation.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <vector>

namespace fd {

/// One zeroed mapping; its pages are taken when they are first written.
class Mapping {
   public:
    explicit Mapping(size_t bytes) : bytes_((bytes + kPage - 1) / kPage * kPage + kPage) {
#if defined(__SANITIZE_ADDRESS__)  // which guards what is allocated, not what is mapped
        base_ = static_cast<char*>(::operator new(bytes, std::align_val_t(kCacheLine)));
        std::memset(base_, 0, bytes);
#else
        void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        base_ = static_cast<char*>(p);
#if defined(MADV_HUGEPAGE)
        madvise(base_, bytes_, MADV_HUGEPAGE);  // advice only: small pages work as well
#endif
#endif
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

#if defined(__SANITIZE_ADDRESS__)
    ~Mapping() { ::operator delete(base_, std::align_val_t(kCacheLine)); }
    char* data() const { return base_; }
#else
    ~Mapping() { munmap(base_, bytes_); }
    char* data() const { return (char*)((size_t(base_) + kPage - 1) / kPage * kPage); }
#endif

   private:
    static constexpr size_t kPage = size_t(2) << 20, kCacheLine = 64;
    size_t bytes_;
    char* base_;
};

/// Many allocations that live and die together, such as the weights of a model.
class Arena {
   public:
    ~Arena() {
        for (Mapping* m : mappings_) delete m;
    }

    void* allocate(size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
        mappings_.push_back(new Mapping(bytes));
        return mappings_.back()->data();
#endif
        bytes = (bytes + kAlign - 1) / kAlign * kAlign;
        if (bytes > left_) {
            size_t size = bytes > kMapping ? bytes : kMapping;
            mappings_.push_back(new Mapping(size));
            next_ = mappings_.back()->data();
            left_ = size;
        }
        void* p = next_;
        next_ += bytes;
        left_ -= bytes;
        return p;
    }

    /// Take back the end of the latest allocation, of which `bytes` remain.
    void shrink(void* latest, size_t bytes) {
#if !defined(__SANITIZE_ADDRESS__)
        char* const end = static_cast<char*>(latest) + (bytes + kAlign - 1) / kAlign * kAlign;
        std::memset(end, 0, next_ - end);
        left_ += next_ - end;
        next_ = end;
#endif
    }

   private:
    static constexpr size_t kAlign = 256, kMapping = size_t(64) << 20;
    std::vector<Mapping*> mappings_;
    char* next_ = nullptr;
    size_t left_ = 0;
};

}  // namespace fd
